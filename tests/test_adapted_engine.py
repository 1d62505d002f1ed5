"""Adapters in the engine against PEFT on torch: alone and mixed, with fewer slots than adapters, loaded and removed meanwhile."""

from dataclasses import replace

import pytest
from adapter_engines import FLOAT32, Answers, adapter_engines, request
from adapter_files import ADAPTERS
from tpu_twins import PallasTwin

from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS
from engine.step.backend import tpu_backend, xla_backend

XLA = xla_backend(FLOAT32)
OF_LATENTS = xla_backend(FLOAT32, latents=True)
TPU = replace(tpu_backend(CHIPS["TPU v5 lite"], PALLAS), attention=PallasTwin())
BACKENDS = [
    pytest.param(("llama2", None, 1, None), id="llama2"),
    *(
        pytest.param((variant, backend, devices, None), id=f"{variant}-{name}", marks=pytest.mark.thorough)
        for variant in ADAPTERS
        for name, backend, devices in (
            ("kernels", None, 1),
            ("XLA", XLA, 1),
            ("XLA-2", XLA, 2),
            ("TPU", TPU, 1),
            ("TPU-2", TPU, 2),
        )
        if not (variant == "deepseek_v3" and backend is TPU)
    ),
]


@pytest.fixture(scope="module", params=BACKENDS)
def compiled(request, tmp_path_factory):
    """Two slots for a variant's adapters."""
    variant, backend, devices, quantization = request.param
    if variant == "deepseek_v3" and backend is XLA:
        backend = OF_LATENTS
    place = tmp_path_factory.mktemp("adapters")
    return adapter_engines(place, variant, backend=backend, devices=devices, quantization=quantization)


def load_all(engine, compiled):
    """Adapters by name; 0 is none."""
    uids = {"": 0}
    for name, directory in compiled.directories.items():
        adapter = engine.read_adapter(str(directory))
        engine.add_adapter(adapter)
        uids[name] = adapter.uid
    return uids


def test_all_adapters_and_the_model_alone_in_one_batch_give_what_torch_gives(compiled):
    """More adapters than slots: rows of two adapters and of none are in one step, and the others wait their turn."""
    engine = compiled.engine()
    uids = load_all(engine, compiled)
    for number, case in enumerate(compiled.cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers = Answers().run(engine)

    for number, case in enumerate(compiled.cases):
        answers.assert_golden(str(number), case)
    assert engine.stats().adapter_loads >= len(uids) - 1
