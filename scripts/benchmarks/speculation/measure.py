"""Speculation on against off: two daemons of one model, one after the other on the same prompts, in pairs.

One of them idles while the other is asked. What is told of a text is the ratio of their tokens a second in each pair: its
median, and the interval in which the median of all pairs is with CONFIDENCE, whatever their distribution (between two of
the sorted ratios, by the binomial distribution of how many are below the median).

llama.cpp's own lookup in the prompt is asked for the same answers of *small*, one at a time, in turns with ours: ours as
whole requests through daemon and client, it by what it says that its decoding alone took.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, cycle
from statistics import harmonic_mean

from engine.hub.names import DEMO_MODEL
from engine.speculation.speculative_config import parse_speculative_config
from scripts.benchmarks.clients.rates import throughput
from scripts.benchmarks.clients.workload import Workload, timelines_of
from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.models import VOCABULARY
from scripts.benchmarks.peers.llama_lookup import LlamaLookup, llama_lookup
from scripts.benchmarks.peers.systems import Ours, serving
from scripts.benchmarks.speculation.language import speaking_model
from scripts.benchmarks.speculation.texts import KINDS, Passages, demo_texts

NGRAM = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
DRAFT_MODEL = '{"method": "draft_model", "model": "demo_draft", "num_speculative_tokens": 8}'
CONFIGS = {"small": (NGRAM,), "demo": (NGRAM, DRAFT_MODEL)}
"""Of the daemons that draft, by model. Random weights have no draft model."""
LIMITS = ("--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--max-model-len", "512")
LOOKUP = "llama-lookup"
REPEATING = ("edit", "extraction", "calls")
"""Of KINDS."""
AT_ONCE = (1, 8)
OUTPUT = 128
CHECKED = 8
"""Prompts of each kind whose answers are compared."""
LEAST_PAIRS = 9
LEAST_SECONDS = 0.4
"""Of one rate: the demo model answers in 20 ms, which is as much noise as rate."""
CONFIDENCE = 0.95
SAME = 100
"""First tokens of an answer that llama.cpp's must have, too: of drafts at its end it says more than it was asked for."""
COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

Take = Callable[[int], list[list[int]]]
"""So many prompts."""


def measure_speculation(
    models: Sequence[str], config: str | None, repeats: int, lookup: str | None = None
) -> Iterator[Figure]:
    """The figures of these of "small" and "demo", for each text and number of rows.

    ``config`` is the daemon's that drafts; without it there are those of CONFIGS, one after the other. ``lookup`` is the
    program llama-lookup, which is measured beside *small*.
    """
    pairs = max(repeats, LEAST_PAIRS)
    for model in models:
        directory = DEMO_MODEL if model == "demo" else speaking_model()
        for chosen in CONFIGS[model] if config is None else (config,):
            speculative = parse_speculative_config(chosen)
            group = f"speculation {model} {speculative.method}"
            with ExitStack() as stack:
                settings = ([*LIMITS, "--speculative-config", chosen], list(LIMITS))
                on, off = (stack.enter_context(serving(directory, each))[0] for each in settings)
                texts = _texts(model, off)
                for kind, take in texts.items():
                    for rows in AT_ONCE:
                        yield from _measure(group, kind, rows, take, on, off, pairs)
                    different = _num_different(take(CHECKED), on, off)
                    yield figure(group, f"{kind}, answers that differ", "", [different], more_is_better=False)
                if lookup is not None and model == "small":
                    theirs, drafts = (
                        stack.enter_context(llama_lookup(lookup, directory)),
                        speculative.num_speculative_tokens,
                    )
                    for kind in REPEATING:
                        yield from _beside_lookup(group, kind, texts[kind](pairs), on, theirs, drafts)


def _texts(model: str, ours: Ours) -> dict[str, Take]:
    """Where prompts of each kind come from; those of the demo model come round again."""
    if model != "demo":
        return {kind: Passages(kind, VOCABULARY).take for kind in KINDS}
    with ours.client() as client:
        prompts = {kind: cycle([client.tokenize(text) for text in texts]) for kind, texts in demo_texts().items()}
    return {kind: lambda count, of=of: [next(of) for _ in range(count)] for kind, of in prompts.items()}


def _measure(group: str, kind: str, rows: int, take: Take, on: Ours, off: Ours, pairs: int) -> Iterator[Figure]:
    name = f"{kind}, {rows} at once"
    for system in (on, off):
        _rate(system, Workload(take(rows), OUTPUT))  # not counted
    before = on.status()
    rates: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        workload = Workload(take(rows), OUTPUT)
        for system in (0, 1) if pair % 2 else (1, 0):
            rates[system].append(_rate((on, off)[system], workload))
    after = on.status()
    drafts, drafted, accepted = (after[counter] - before[counter] for counter in COUNTED)
    ratios = [with_it / without for with_it, without in zip(*rates, strict=True)]
    low, high = interval(ratios)
    yield figure(group, name, "tok/s", rates[0], others={"off": rates[1]})
    yield figure(group, f"{name}, of off, by pair ({low:.2f} - {high:.2f})", "x", ratios)
    yield figure(group, f"{name}, drafts accepted", "%", [100 * accepted / drafted if drafted else 0.0])
    yield figure(group, f"{name}, tokens a row with drafts", "", [1 + accepted / drafts if drafts else 1.0])


def _beside_lookup(
    group: str, kind: str, prompts: list[list[int]], on: Ours, lookup: LlamaLookup, drafts: int
) -> Iterator[Figure]:
    name, different = f"{kind}, 1 at once, beside {LOOKUP}", 0
    rates: tuple[list[float], list[float]] = ([], [])
    for pair, prompt in enumerate(prompts):
        for system in (0, 1) if pair % 2 else (1, 0):
            if system:
                decoded = lookup.decode(prompt, OUTPUT, drafts)
                rates[system].append(decoded.rate)
            else:
                rates[system].append(_rate(on, Workload([prompt], OUTPUT)))
        different += _answer(on, prompt)[:SAME] != decoded.token_ids[:SAME]
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    low, high = interval(ratios)
    yield figure(group, name, "tok/s", rates[0], others={LOOKUP: rates[1]})
    yield figure(group, f"{name}, by pair ({low:.2f} - {high:.2f})", "x", ratios)
    yield figure(group, f"{name}, answers that differ", "", [different], more_is_better=False)


def _rate(system: Ours, workload: Workload) -> float:
    """Tokens a second of a workload whose prompts are in the prefix cache; it is run again until all took LEAST_SECONDS."""
    system.run(Workload(workload.prompts, 1))
    rates: list[float] = []
    while sum(1 / rate for rate in rates) * len(workload.prompts) * workload.max_tokens < LEAST_SECONDS:
        rates.append(throughput(timelines_of(system, workload)))
    return harmonic_mean(rates)


def _num_different(prompts: list[list[int]], on: Ours, off: Ours) -> int:
    """Of greedy answers, one at a time, those that are not the same tokens."""
    return sum(_answer(on, prompt) != _answer(off, prompt) for prompt in prompts)


def _answer(system: Ours, prompt: list[int]) -> list[int]:
    with system.client() as client:
        answer: list[int] = client.complete(prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True).token_ids
    return answer


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, with CONFIDENCE at least; the least and the largest value where there are too few."""
    count, ordered = len(values), sorted(values)
    below = accumulate(math.comb(count, rank) / 2**count for rank in range(count // 2))
    rank = sum(2 * share <= 1 - CONFIDENCE for share in below) - 1
    return ordered[max(0, rank)], ordered[count - 1 - max(0, rank)]
