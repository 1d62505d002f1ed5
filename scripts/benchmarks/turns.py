"""Conversations of many turns that the pool of pages has no room for, with a tier in host memory and without one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ipc.benchmark.timeline import percentile
from ipc.client import Client
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.models import size_of
from scripts.benchmarks.processes.daemon import Daemon

TALKS, TURNS, AT_ONCE = 24, 6, 4
FIRST_PROMPT, PROMPT, OUTPUT = 512, 64, 32
"""Tokens of a conversation's first turn, of each further one, and of each answer."""
POOL_PAGES, PAGE_SIZE = 400, 16
"""6,400 tokens on the device; all conversations together have four times as many at their end."""
SETTINGS = (
    "--num-pages", str(POOL_PAGES), "--page-size", str(PAGE_SIZE), "--max-model-len", "2048", "--max-num-seqs", "8",
)  # fmt: skip
HOST_GIB = "1"


@dataclass
class Answers:
    """What one run of all conversations gave."""

    ttft: list[float] = field(default_factory=list)
    """Seconds to the first token of each turn but the first."""
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By conversation and turn."""
    computed: float = 0.0
    """Prompt tokens that the daemon computed for them."""
    copied: float = 0.0
    """Bytes that came from the host."""
    seconds: float = 0.0


def measure_turns(model: str, directory: Path, repeat: int) -> Iterator[Figure]:
    """Prompt tokens computed, time to first token and in all, beside a daemon without the tier, which has its turn
    after each of ours."""
    vocabulary = size_of(directory).vocabulary
    ours: list[Answers] = []
    others: list[Answers] = []
    with (
        Daemon(directory, *SETTINGS, "--host-cache-gib", HOST_GIB) as tier,
        Daemon(directory, *SETTINGS) as plain,
        tier.client() as one,
        plain.client() as other,
    ):
        for seed in range(repeat):
            ours.append(_talk(one, vocabulary, seed))
            others.append(_talk(other, vocabulary, seed))
    group = f"turns {model}"
    for name, unit, numbers in (
        ("prompt tokens computed", "", [[run.computed for run in runs] for runs in (ours, others)]),
        ("TTFT p50", "ms", [[MILLISECONDS * percentile(run.ttft, 50) for run in runs] for runs in (ours, others)]),
        ("TTFT p99", "ms", [[MILLISECONDS * percentile(run.ttft, 99) for run in runs] for runs in (ours, others)]),
        ("all conversations", "s", [[run.seconds for run in runs] for runs in (ours, others)]),
    ):
        yield figure(group, name, unit, numbers[0], more_is_better=False, others={"without a tier": numbers[1]})
    yield figure(group, "copied from the host", "MB", [run.copied / 1e6 for run in ours])
    different = [sum(a.tokens[at] != b.tokens[at] for at in a.tokens) for a, b in zip(ours, others, strict=True)]
    yield figure(group, "answers that differ", "", different, more_is_better=False)


def _talk(client: Client, vocabulary: int, seed: int) -> Answers:
    """All conversations, whose turns come round and round, AT_ONCE at once."""
    rng, answers = np.random.default_rng(seed), Answers()
    said: list[list[int]] = [rng.integers(1, vocabulary, FIRST_PROMPT - PROMPT).tolist() for _ in range(TALKS)]

    def ask(talk: int, turn: int, prompt: list[int]) -> None:
        said[talk] += prompt
        began, first, tokens = time.perf_counter(), 0.0, list[int]()
        for piece in client.generate(said[talk], max_tokens=OUTPUT, temperature=0, ignore_eos=True):
            first = first or time.perf_counter() - began
            tokens += piece.token_ids
        said[talk] += tokens
        answers.tokens[talk, turn] = tokens
        if turn:
            answers.ttft.append(first)

    before, began = client.status(), time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(TURNS):
            prompts = rng.integers(1, vocabulary, (TALKS, PROMPT)).tolist()
            list(pool.map(lambda talk, turn=turn, prompts=prompts: ask(talk, turn, prompts[talk]), range(TALKS)))
    after = client.status()
    answers.seconds = time.perf_counter() - began
    answers.computed = after["prompt_tokens"] - before["prompt_tokens"]
    answers.copied = after["host_bytes_loaded"] - before["host_bytes_loaded"]
    return answers
