"""scripts/bench speculation: a model with a language, prompts of each kind, and what is made of two daemons."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
from loading import load

from engine.models.model_config import read_model_config
from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.models import VOCABULARY, write_model
from scripts.benchmarks.peers.llama_lookup import Decoded
from scripts.benchmarks.speculation import measure
from scripts.benchmarks.speculation.language import FIRST_WORD, Speaker, Tensors, circle
from scripts.benchmarks.speculation.measure import LEAST_PAIRS, interval, measure_speculation
from scripts.benchmarks.speculation.texts import CUE, KINDS, PASSAGE, Passages, demo_texts

pytestmark = pytest.mark.thorough

SMALL = Speaker(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, vocabulary=500)


def test_the_head_knows_the_successor_of_each_word(tmp_path) -> None:
    """All are one circle; the model is one that we serve."""
    write_model(tmp_path / "model", SMALL, Tensors().draw)
    decoder, words = load(tmp_path / "model"), circle(500)

    embedding, head = (table.get_value().values for table in (decoder.embedding, decoder.lm_head))
    logits = np.asarray(embedding)[words] @ np.asarray(head)[:500].T

    assert not read_model_config(tmp_path / "model").tied_embeddings
    assert sorted(words) == list(range(FIRST_WORD, 500))
    assert np.mean(np.argmax(logits, 1) == np.roll(words, -1)) > 0.5  # 16 numbers tell 243 words apart most of the time


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_keeps_as_much_of_its_passage_as_its_kind_says(kind) -> None:
    """At its end are the first words of the passage, and no two prompts begin alike."""
    prompts, (kept, others) = Passages(kind, VOCABULARY).take(40), KINDS[kind]
    successors = dict(zip(circle(VOCABULARY).tolist(), np.roll(circle(VOCABULARY), -1).tolist(), strict=True))

    for prompt in prompts:
        passage = [prompt[PASSAGE]]
        while len(passage) < PASSAGE:
            passage.append(successors[passage[-1]])
        same = [word == said for word, said in zip(passage, prompt[:PASSAGE], strict=True)]
        assert prompt[PASSAGE:] == passage[:CUE] and len(prompt) == PASSAGE + CUE
        assert sum(same) / PASSAGE == pytest.approx(kept / (kept + others), abs=0.05)
    assert len({prompt[PASSAGE] for prompt in prompts}) == 40


def test_there_are_enough_prompts_for_the_demo_model() -> None:
    """Eight of each kind, none twice."""
    assert all(len(set(texts)) == len(texts) == 8 for texts in demo_texts().values())


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of nine values it is the second and the last but one; drawn a thousand times, it misses at most one in twenty."""
    rng = random.Random(0)
    missed = 0
    for _ in range(1000):
        low, high = interval([rng.expovariate(1) for _ in range(12)])
        missed += not low <= np.log(2) <= high

    assert interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (2, 8) and interval([3, 1, 2]) == (1, 3)
    assert missed < 50


class Clockwork:
    """Makes ``rate`` tokens a second of each request, in pieces of two; each answer is its prompt."""

    name = "oDriver"

    def __init__(self, rate):
        self._rate = rate
        self._asked = 0

    def run(self, workload):
        self._asked += 1
        arrivals = [((number + 1) / self._rate, 2) for number in range(0, workload.max_tokens, 2)]
        return [Timeline(len(prompt), 0.0, arrivals) for prompt in workload.prompts]

    def status(self):
        return {"num_drafts": self._asked, "num_draft_tokens": 4 * self._asked, "num_accepted_tokens": 3 * self._asked}

    @contextmanager
    def client(self):
        yield self

    def complete(self, prompt, **params):
        del params
        self.token_ids = prompt
        return self


def test_the_figures_are_of_pairs(tmp_path, monkeypatch) -> None:
    """A daemon of 30 tokens a second with drafts beside one of 20 without; three of four drafts are accepted."""

    @contextmanager
    def serving(directory, settings):
        assert directory == tmp_path
        yield Clockwork(30 if "--speculative-config" in settings else 20), []

    monkeypatch.setattr(measure, "serving", serving)
    monkeypatch.setattr(measure, "speaking_model", lambda: tmp_path)

    figures = list(measure_speculation(["small"], None, 1))

    assert len(figures) == len(KINDS) * (2 * 4 + 1)
    rate, pairs, accepted, tokens = figures[:4]
    assert rate.ratios == {"off": pytest.approx(1.5)} and len(pairs.runs) == LEAST_PAIRS
    assert pairs.value == pytest.approx(1.5) and pairs.name == "edit, 1 at once, of off, by pair (1.50 - 1.50)"
    assert (accepted.value, tokens.value) == (75, 4)
    assert figures[8].value == 0


def test_a_lookup_of_llama_cpp_is_measured_beside_ours(tmp_path, monkeypatch) -> None:
    """Ours gives half as many tokens a second more; of one kind it says other tokens than ours."""

    class Lookup:
        def decode(self, prompt, max_tokens, drafts):
            assert (max_tokens, drafts) == (128, 7)
            return Decoded(prompt if prompt[0] else [1], 20 * 128 / 127)

    @contextmanager
    def llama_lookup(program, directory):
        assert (program, directory) == ("a program", tmp_path)
        yield Lookup()

    @contextmanager
    def serving(directory, settings):
        del directory, settings
        yield Clockwork(30), []

    texts = {kind: lambda count, first=kind != "calls": [[int(first), 5]] * count for kind in KINDS}
    monkeypatch.setattr(measure, "serving", serving)
    monkeypatch.setattr(measure, "speaking_model", lambda: tmp_path)
    monkeypatch.setattr(measure, "llama_lookup", llama_lookup)
    monkeypatch.setattr(measure, "_texts", lambda *_: texts)

    figures = list(measure_speculation(["small"], None, 1, "a program"))[-3 * 3 :]

    assert [figure.ratios.get("llama-lookup") for figure in figures[::3]] == [pytest.approx(1.5)] * 3
    assert figures[1].name == "edit, 1 at once, beside llama-lookup, by pair (1.50 - 1.50)"
    assert [figure.value for figure in figures[2::3]] == [0, 0, LEAST_PAIRS]
