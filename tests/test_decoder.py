"""The decoder against transformers on torch: goldens by scripts/make_goldens, attention by the book."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint
from loading import load
from moe_checkpoints import MOE_VARIANTS
from state_checkpoints import STATE_VARIANTS
from test_golden import OF_OTHERS
from whole_rows import compute_logprobs, whole_rows_of

from engine.devices.mesh import one_device
from engine.models.model_config import read_config_file
from engine.models.partition import Partition
from engine.models.weights.store import abstract_decoder
from engine.models.weights.weight_format import Layout, WeightFormat

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-4


ELSEWHERE = {*MOE_VARIANTS, *STATE_VARIANTS, "llama2", "mistral", "gemma2"}
"""Variants whose mechanisms test_golden, test_experts and test_state show in every run."""
AGAIN = {"llama2_bfloat16", "qwen3_sharded", "qwen2_sliding", "phi3", "gemma3_vision", "mistral_vision"}
"""Those that are another variant's family once more; what else they have, the tests of weights and of windows show."""

NARROW = sorted(VARIANTS.keys() - {"olmo"})
"""All but one of which a constant once widened activations."""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in {*ELSEWHERE, *AGAIN, *OF_OTHERS} else ())
        for name in VARIANTS
    ],
)
def test_decoder_agrees_with_transformers(tmp_path: Path, variant: str) -> None:
    """Each family's decoder takes transformers' greedy path, with its log-probabilities."""
    directory = build_checkpoint(tmp_path, variant)
    cases: list[dict[str, Any]] = json.loads((GOLDENS / f"{variant}.json").read_text())["cases"]
    decoder = load(directory)

    computed = compute_logprobs(decoder, [case["prompt"] + case["tokens"] for case in cases])

    for case, logprobs in zip(cases, computed, strict=True):
        start = len(case["prompt"]) - 1
        path = logprobs[start : start + len(case["tokens"])]
        assert path.argmax(axis=-1).tolist() == case["tokens"]
        np.testing.assert_allclose(path.max(axis=-1), case["logprobs"], rtol=0, atol=TOLERANCE)
        for top in case["top"]:
            likeliest = path[top["position"], top["token_ids"]]
            # Of one that is next to impossible the processor decides the last bits: it is a difference of large logits.
            np.testing.assert_allclose(likeliest, top["logprobs"], rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["olmo", *(pytest.param(name, marks=pytest.mark.thorough) for name in NARROW)])
def test_activations_stay_in_their_dtype(tmp_path: Path, variant: str) -> None:
    """No constant of a layer widens bfloat16, which a loop over layers would refuse, and logits are float32."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VARIANTS[variant].config))
    form = WeightFormat(np.dtype(jnp.bfloat16), Layout.MATRIX)
    decoder = abstract_decoder(Partition(read_config_file(path)), form, mesh=one_device())

    hidden, logits = whole_rows_of(decoder, rows=2, length=16)

    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_goldens_are_of_all_variants() -> None:
    """There is a golden for each checkpoint, one for sampling, one for tokenizers and no other."""
    assert {path.stem for path in GOLDENS.glob("*.json")} == {*VARIANTS, "sampling", "sentencepiece"}
