"""``lora_dtype``: adapters whose factors are in another dtype than activations."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from adapter_engines import FLOAT32, AdapterEngines, Answers, adapter_engines, request
from safetensors.numpy import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.memory.footprint import adapter_sizes
from engine.step.backend import Backend
from engine.step.backend_choice import xla_backend

BFLOAT16 = np.dtype(jnp.bfloat16)
XLA = xla_backend(FLOAT32)
OF_WHOLE_SCALE = {"llama2": ("everything", "tables"), "mixtral": ("experts by themselves", "attention")}
"""Adapters by variant whose scale is a power of two, so that it moves no rounding."""


@pytest.mark.parametrize("variant", OF_WHOLE_SCALE)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(None, id="kernels", marks=pytest.mark.thorough),
        pytest.param(XLA, id="XLA", marks=pytest.mark.exhaustive),
    ],
)
def test_factors_are_rounded_and_nothing_else(variant: str, backend: Backend | None, tmp_path: Path) -> None:
    """An adapter of float32 gives what its numbers rounded to bfloat16 give, in half of a slot."""
    narrow = adapter_engines(tmp_path / "narrow", variant, backend=backend, dtype=BFLOAT16)
    wide = adapter_engines(tmp_path / "wide", variant, backend=backend)
    assert slot_bytes(narrow) < 0.6 * slot_bytes(wide)

    for name in OF_WHOLE_SCALE[variant]:
        rounded = answers(wide, round_numbers(wide.directories[name]), name)
        found = answers(narrow, narrow.directories[name], name)

        assert found.tokens == rounded.tokens
        for number, logprobs in found.logprobs.items():
            np.testing.assert_allclose(logprobs, rounded.logprobs[number], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("named", "dtype"), [("auto", FLOAT32), ("bfloat16", BFLOAT16), ("float32", FLOAT32)])
def test_slots_are_of_the_dtype_that_is_asked_for(named: str, dtype: np.dtype[Any]) -> None:
    """By default that of activations."""
    sizes = adapter_sizes(EngineConfig(enable_lora=True, lora_dtype=named), FLOAT32, XLA)

    assert sizes is not None and sizes.dtype == dtype


def test_what_it_may_be_is_told() -> None:
    """And that it is for adapters."""
    with pytest.raises(ConfigurationError, match="lora_dtype must be one of auto, bfloat16, float32"):
        EngineConfig(enable_lora=True, lora_dtype="fp8")
    with pytest.raises(ConfigurationError, match="lora_dtype is for adapters, which are not served"):
        EngineConfig(lora_dtype="bfloat16")


def slot_bytes(engines: AdapterEngines) -> int:
    """All slots' bytes on the device."""
    sizes = engines.manager.shapes.adapters
    assert sizes is not None and engines.manager.adapters is not None
    return sum(leaf.nbytes(1) for kernel in engines.manager.adapters.kernels for leaf in kernel.leaves(sizes.max_loras))


def round_numbers(directory: Path) -> Path:
    """The adapter with numbers that bfloat16 has."""
    file = directory / "adapter_model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    save_file({name: one.astype(BFLOAT16).astype(np.float32) for name, one in tensors.items()}, file)
    return directory


def answers(engines: AdapterEngines, directory: Path, name: str) -> Answers:
    """The golden's cases of one adapter."""
    engine = engines.engine()
    adapter = engine.read_adapter(str(directory))
    engine.add_adapter(adapter)
    for number, case in enumerate(engines.cases):
        if case["adapter"] == name:
            engine.add(request(str(number), case, adapter.uid))
    return Answers().run(engine)
