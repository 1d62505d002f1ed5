"""The draft model for the model we ship: how it learns, and how it is judged."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from caching.attention.spec import AttentionSpec
from engine.build import begin_compiling, build
from engine.config import EngineConfig
from engine.hub.names import DEMO_DRAFT_MODEL, DEMO_MODEL, directory_of
from engine.models.decoder import Decoder
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from scripts.demo.acceptance import KINDS, Text, answer, prompts, right_drafts, tokens_a_step
from scripts.demo.corpus import Batch, Document
from scripts.demo.draft_model import lessons, load_model, soft_cross_entropy
from scripts.demo.train import train

VOCABULARY = 11


@given(right=st.lists(st.lists(st.booleans(), min_size=1), min_size=1, max_size=3), drafts=st.integers(1, 5))
def test_steps_are_counted_as_they_are_verified(right: list[list[bool]], drafts: int) -> None:
    """A step gives the drafts before the first wrong one, and the target's next token, as far as the text goes."""
    steps = 0
    for text in right:
        place = 0
        while place < len(text):
            last = min(place + drafts, len(text))
            while place < last and text[place]:
                place += 1
            place += 1
            steps += 1

    assert tokens_a_step([np.array(text) for text in right], drafts) == sum(map(len, right)) / steps


def test_the_draft_model_has_a_name(tmp_path, monkeypatch) -> None:
    """It is the shipped one's, unless a directory is called so."""
    monkeypatch.chdir(tmp_path)
    assert directory_of("demo_draft") == DEMO_DRAFT_MODEL

    Path("demo_draft").mkdir()

    assert directory_of("demo_draft") == Path("demo_draft")


def build_decoder(hidden: int, layers: int, seed: int) -> Decoder:
    """A decoder of few weights, which are large enough that it prefers some tokens."""
    attention = SelfAttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scores=AttentionSpec(8**-0.5))
    spec = ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        blocks=(BlockSpec(attention, GatedSpec(16)),) * layers,
        max_position=64,
        tied_embeddings=False,
        eos_token_ids=(0,),
    )
    decoder = Decoder(Partition(spec), nnx.Rngs(seed))
    nnx.update(decoder, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, nnx.state(decoder)))
    return decoder


def batches(seed: int):
    """Rows of random tokens, without end."""
    rng = Random(seed)
    while True:
        batch = Batch.empty(8, 32)
        for row in range(8):
            batch.place(row, 0, 1, Document([rng.randrange(VOCABULARY) for _ in range(33)], [1.0] * 33))
        yield batch


def agreement(target: Decoder, draft: Decoder) -> float:
    """The share of tokens of other rows after which both choose the same."""
    rows = list(islice(batches(1), 8))
    chosen = [
        [np.argmax(lesson.probabilities, -1) for lesson in lessons(model, iter(rows))] for model in (target, draft)
    ]
    return float(np.mean(np.equal(*chosen)))


@pytest.mark.thorough
def test_a_draft_learns_what_its_target_says() -> None:
    """After lessons it chooses the target's token more often than by chance."""
    target = build_decoder(hidden=24, layers=2, seed=0)

    draft = build_decoder(hidden=16, layers=1, seed=1)
    before = agreement(target, draft)

    with jax.numpy_dtype_promotion("standard"):  # optax
        train(draft, soft_cross_entropy, lessons(target, batches(0)), 100, 6e-3, lambda: None, Console(quiet=True))

    assert before < 0.3 and agreement(target, draft) > 0.6


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, float], list[Text]]:
    """The shipped model's answers to few prompts that no training has read, by kind and temperature."""

    def compile_one_size(served, decoder, shapes):
        return begin_compiling(served, decoder, replace(shapes, smallest_step=shapes.max_num_batched_tokens))

    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=8)
    engine = build(config, lambda _: None, lambda compiled: compiled.engine(), compile_one_size)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    asked = {kind: prompts(kind, tokenizer, 8) for kind in KINDS}
    return {(kind, at): answer(engine, asked[kind], at) for kind in KINDS for at in (0.0, 0.7)}


@pytest.mark.thorough
@pytest.mark.parametrize(("directory", "least"), [(DEMO_MODEL, 0.99), (DEMO_DRAFT_MODEL, 0.7)], ids=["target", "draft"])
def test_drafts_are_right(texts, directory, least) -> None:
    """Greedy and drawn: all of the target's own, but for what whole rows round otherwise than steps, and most of the
    draft model's."""
    model = load_model(directory)

    shares = {case: np.concatenate(list(right_drafts(model, told))).mean() for case, told in texts.items()}

    assert min(shares.values()) > least, shares
