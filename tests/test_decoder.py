"""The decoder against transformers on torch: goldens by scripts/make_goldens, attention by the book."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint
from flax import nnx
from jax import Array
from plain_attention import DenseAttention

from engine.mesh import one_device
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.step_context import StepContext
from engine.models.weights import load_decoder

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-4


def compute_logprobs(decoder: Decoder, sequences: list[list[int]]) -> np.ndarray:
    """f32[sequence, position, vocab]; causal attention keeps the padding on the right out of it."""
    length = max(map(len, sequences))
    token_ids = np.array([sequence + [0] * (length - len(sequence)) for sequence in sequences], np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), token_ids.shape)

    @nnx.jit
    def forward(decoder: Decoder, token_ids: Array, positions: Array) -> Array:
        caches = [None] * decoder.config.num_layers
        _, hidden = decoder(token_ids, caches, StepContext(decoder.rotation(positions), DenseAttention()))
        return jax.nn.log_softmax(decoder.logits(hidden), axis=-1)

    return np.asarray(forward(decoder, jnp.asarray(token_ids), jnp.asarray(positions)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoder_agrees_with_transformers(tmp_path: Path, variant: str) -> None:
    """Each family's decoder takes transformers' greedy path, with its log-probabilities."""
    directory = build_checkpoint(tmp_path, variant)
    cases: list[dict[str, Any]] = json.loads((GOLDENS / f"{variant}.json").read_text())["cases"]
    decoder = load_decoder(
        directory, read_model_config(directory), jnp.float32, mesh=one_device(), progress=lambda done, total: None
    )

    computed = compute_logprobs(decoder, [case["prompt"] + case["tokens"] for case in cases])

    for case, logprobs in zip(cases, computed, strict=True):
        start = len(case["prompt"]) - 1
        path = logprobs[start : start + len(case["tokens"])]
        assert path.argmax(axis=-1).tolist() == case["tokens"]
        np.testing.assert_allclose(path.max(axis=-1), case["logprobs"], rtol=0, atol=TOLERANCE)
        for top in case["top"]:
            likeliest = path[top["position"], top["token_ids"]]
            np.testing.assert_allclose(likeliest, top["logprobs"], rtol=0, atol=TOLERANCE)


def test_goldens_are_of_all_variants() -> None:
    """There is a golden for each checkpoint, one for sampling and no other."""
    assert {path.stem for path in GOLDENS.glob("*.json")} == {*VARIANTS, "sampling"}
