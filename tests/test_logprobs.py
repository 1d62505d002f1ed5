"""Log-probabilities of prompt and output against a plain forward pass: within 1e-4, however the prompt is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from kernels_needed import kernels_needed
from loading import load
from plain_attention import DenseAttention

from engine.build import build_engine
from engine.config import EngineConfig
from engine.models.step_context import StepContext
from engine.request_limits import MAX_LOGPROBS
from engine.sampling import cpu_sampler
from engine.sampling.logprobs import compute_logprobs, unpack_logprobs
from engine.sampling.sampler import NO_TOKEN
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.verification import NOT_TEXT

MAX_MODEL_LEN = 36
SETTINGS = [
    pytest.param({"max_num_batched_tokens": 7}, id="chunks", marks=pytest.mark.thorough),
    pytest.param({"max_num_batched_tokens": 64}, id="one chunk", marks=pytest.mark.thorough),
    pytest.param({"max_num_batched_tokens": 7, "num_pages": 14}, id="chunks, preempted", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small random checkpoint of one layer."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def plain_logprobs(directory, token_ids):
    """f32[tokens, vocab] by one forward pass with causal attention, without pages, chunks or a step."""
    padded = np.zeros((1, MAX_MODEL_LEN), np.int32)  # behind all others, which causal attention keeps out
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(forward(load(directory), padded))[: len(token_ids)]


@nnx.jit
def forward(decoder, token_ids):
    """f32[tokens, vocab] of i32[1, tokens]."""
    positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    step = StepContext(decoder.rotations(positions), DenseAttention())
    _, hidden = decoder(token_ids, [None] * decoder.partition.model.num_layers, step)
    return jax.nn.log_softmax(decoder.logits(hidden[0]))


def build_sequences():
    """Prompts of many lengths; some ask for much, some for little, one for nothing."""
    rng = np.random.default_rng(1)
    asked = [(3, 20), (0, 0), (20, None), (None, 5), (None, None)]
    return [
        Sequence(
            str(number),
            rng.integers(4, 140, length).tolist(),
            SamplingParams(logprobs=output, prompt_logprobs=prompt, temperature=0.7, presence_penalty=1),
            frozenset(),
            12,
            seed=number,
        )
        for number, (length, (output, prompt)) in enumerate(zip([1, 2, 9, 19, 20], asked, strict=True))
    ]


def run(directory, settings):
    """Serve the sequences together; each with its outputs, and the engine."""
    fixed = {"max_num_seqs": 4, "page_size": 3, "num_pages": 99, "max_model_len": MAX_MODEL_LEN}
    engine = build_engine(EngineConfig(model=directory, **{**fixed, **settings}), lambda progress: None)
    served = {sequence.request_id: (sequence, []) for sequence in build_sequences()}
    for sequence, _ in served.values():
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            served[output.request_id][1].append(output)
    assert engine.stats().compilations_after_ready == 0
    return served.values(), engine


def assert_plain(given, expected, token_id, count):
    """One place's log-probabilities are those of f32[vocab]: its token with its rank, then the likeliest in order."""
    order = np.argsort(-expected)
    assert given.token_ids[0] == token_id and len(given.token_ids) == 1 + count
    assert given.ranks == [1 + int((expected > expected[token_id]).sum()), *range(1, count + 1)]
    np.testing.assert_allclose(given.logprobs, expected[given.token_ids], atol=1e-4)
    np.testing.assert_allclose(given.logprobs[1:], expected[order[:count]], atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
def test_logprobs_equal_a_plain_forward_pass(directory, settings):
    """Of every token asked for, once and in order, from raw logits whatever penalties and temperature do."""
    served, engine = run(directory, settings)

    assert (engine.stats().preemptions > 0) == ("num_pages" in settings)
    assert_all_plain(directory, served)


@pytest.mark.thorough
def test_a_bias_of_logits_is_in_the_logprobs_of_prompts_too(tmp_path):
    """They are computed apart from those of the output."""
    directory = build_checkpoint(tmp_path / "phi", "phi", num_hidden_layers=1)

    served, _ = run(directory, {"max_num_batched_tokens": 64})

    assert_all_plain(directory, served)


def assert_all_plain(directory, served):
    """Each sequence has been told what it asked for, of a plain forward pass."""
    for sequence, outputs in served:
        params, prompt = sequence.params, sequence.prompt_token_ids
        expected = plain_logprobs(directory, prompt + sequence.output_token_ids)
        told = [one for output in outputs for one in output.logprobs]
        assert len(told) == (0 if params.logprobs is None else 12)
        for place, (one, token_id) in enumerate(zip(told, sequence.output_token_ids, strict=False)):
            assert_plain(one, expected[len(prompt) + place - 1], token_id, params.logprobs)
        told = [one for output in outputs for one in output.prompt_logprobs]
        assert len(told) == (0 if params.prompt_logprobs is None else len(prompt) - 1)
        for place, one in enumerate(told, start=1):
            assert_plain(one, expected[place - 1], prompt[place], params.prompt_logprobs)


@pytest.mark.parametrize(
    "vocabulary", [5000, *(pytest.param(size, marks=pytest.mark.thorough) for size in (3, 127, 128))]
)
def test_a_cpus_kernel_gives_the_same_logprobs(vocabulary):
    """Ids and ranks are equal, the first of equal tokens first, in a vocabulary of one block, of less, and of many.

    A row whose logits are a fault has none, nor has one without a token, behind a wrong draft."""
    with kernels_needed():
        cpu_sampler.prepare()
    rng = np.random.default_rng(vocabulary)
    logits = np.round(rng.normal(0, 5, (7, vocabulary)), 1).astype(np.float32)  # rounded, so that some are equal
    logits[1] *= 100
    logits[2, 1] = np.nan
    token_ids = rng.integers(0, vocabulary, 7).astype(np.int32)
    token_ids[[0, 4]] = NO_TOKEN, NOT_TEXT

    expected, given = (
        np.asarray(compute(logits, token_ids)) for compute in (compute_logprobs, cpu_sampler.compute_logprobs)
    )

    numbers = [0, *range(expected.shape[1] // 2 + 1, expected.shape[1])]
    finite = ~np.isin(np.arange(7), [0, 2, 4])
    np.testing.assert_array_equal(np.delete(given, numbers, 1)[finite], np.delete(expected, numbers, 1)[finite])
    told, real = given[:, numbers].view(np.float32), expected[:, numbers].view(np.float32)
    np.testing.assert_allclose(told[finite], real[finite], rtol=1e-6, atol=1e-5)
    assert np.isnan(told[~finite]).all() and not np.delete(given, numbers, 1)[~finite].any()


def test_a_vocabulary_smaller_than_the_likeliest_gives_all_of_it():
    """What there is, and no more."""
    logits = np.log(np.array([[0.2, 0.5, 0.3]], np.float32))

    row = np.asarray(compute_logprobs(jnp.asarray(logits), jnp.array([2], jnp.int32)))[0]
    told = unpack_logprobs(row, 2, MAX_LOGPROBS)

    assert told.token_ids == [2, 1, 2, 0] and told.ranks == [2, 1, 2, 3]
    np.testing.assert_allclose(told.logprobs, np.log([0.3, 0.5, 0.3, 0.2]), atol=1e-6)
