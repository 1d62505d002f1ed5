"""What each variant of sampling costs a step of 64 rows, beside greedy; the child that measures it is this module too.

Peaked logits have their cuts among the likeliest tokens, as a model's mostly do; flat ones have them far beyond. "sort" and
"lax.top_k" are what finding cuts without bisection would take: neither is in use.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.devices.mesh import one_device
from engine.sampling.logit_bias import neutral_bias
from engine.sampling.needs import Need
from engine.sampling.penalties import neutral_penalties
from engine.sampling.sampler_inputs import PARAMETERS, pack_inputs
from engine.step.backend_choice import choose_backend
from engine.step.compilation import compile_program
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes
from engine.step.sampling_programs import (
    BIAS,
    DRAW,
    LOGPROBS,
    PENALTIES,
    WRITE_BIAS,
    WRITE_PENALTIES,
    SamplingPrograms,
)
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.processes.child import answer_all, ask_once

ROWS = 64
VOCABULARIES = (32_000, 152_064)
ALONE = (" once", " alone")
"""Ends of the names of what is no step."""
FLAT, PEAKED = 3.0, 12.0
"""Standard deviations of normal logits."""


def measure_sampling(repeats: int) -> Iterator[Figure]:
    """Milliseconds of each variant for ROWS rows; greedy stands beside the others."""
    for vocabulary in VOCABULARIES:
        runs = ask_once("scripts.benchmarks.sampling", [vocabulary, repeats], dict[str, list[float]])
        greedy = [MILLISECONDS * seconds for seconds in runs.pop("greedy")]
        group = f"sampling, {ROWS} rows of {vocabulary:,}"
        yield figure(group, "greedy", "ms", greedy, more_is_better=False)
        for name, tries in runs.items():
            values = [MILLISECONDS * seconds for seconds in tries]
            others = {} if name.endswith(ALONE) else {"greedy": greedy}
            yield figure(group, name, "ms", values, more_is_better=False, others=others)


def _measure(question: list[int]) -> dict[str, list[float]]:
    vocabulary, repeats = question
    return {name: _seconds(work, repeats) for name, work in _variants(vocabulary)}


def _variants(vocabulary: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and what to time."""
    bench = _Bench(vocabulary)
    state, compiled = bench.state, bench.compiled
    greedy = bench.drawing(bench.greedy, PEAKED)
    yield "greedy", greedy
    yield "temperature", bench.drawing(DRAW, PEAKED, temperature=1)
    for name, spread in (("peaked", PEAKED), ("flat", FLAT)):
        yield f"top-k 50, {name}", bench.drawing(DRAW, spread, temperature=1, top_k=50)
        yield f"top-p 0.9, {name}", bench.drawing(DRAW, spread, temperature=1, top_p=0.9)
    yield "top-k 1000, flat", bench.drawing(DRAW, FLAT, temperature=1, top_k=1000)
    yield "min-p 0.1", bench.drawing(DRAW, PEAKED, temperature=1, min_p=0.1)
    yield "greedy, bias and masks", bench.processing(compiled[BIAS], state.new_bias())
    yield "greedy, penalties", bench.processing(compiled[PENALTIES], state.new_penalties())
    find, logits = compiled[LOGPROBS], bench.logits[PEAKED]
    yield "greedy, log-probabilities", lambda: find(logits, greedy())
    yield "a sequence's bias, once", bench.writing(compiled[WRITE_BIAS], state.new_bias(), neutral_bias(vocabulary))
    counts = neutral_penalties(vocabulary)
    yield "a sequence's counts, once", bench.writing(compiled[WRITE_PENALTIES], state.new_penalties(), counts)
    flat, sort, top_k = bench.logits[FLAT], jax.jit(jnp.sort), jax.jit(lambda logits: jax.lax.top_k(logits, 1024))
    yield "jnp.sort alone", lambda: sort(flat)
    yield "lax.top_k of 1024 alone", lambda: top_k(flat)


class _Bench:
    """Compiled functions over random logits; what they take donated is kept and handed on, as from step to step."""

    def __init__(self, vocabulary: int) -> None:
        self.layout, backend = StepLayout(ROWS, ROWS), choose_backend(16, 64, np.dtype(np.float32))
        self.state = SamplingPrograms(SlotShapes(ROWS, 1, 1), vocabulary, one_device(), operations=backend.sampling)
        self.greedy = self.state.sampler(Need(0))
        programs = [*self.state.of(self.layout), *self.state.writers()]
        self.compiled: dict[str, Any] = {program.name: compile_program(program).compiled for program in programs}
        normal = np.random.default_rng(0).normal(size=(ROWS, vocabulary)).astype(np.float32)
        self.logits = {spread: jax.device_put(normal * np.float32(spread)) for spread in (PEAKED, FLAT)}
        self._key = jax.random.key(0)
        self._last_token = jnp.zeros(ROWS + 1, jnp.int32)

    def drawing(self, sampler: str, spread: float, **columns: float) -> Callable[[], object]:
        """One draw for all rows."""
        rows = self._packed(**columns)
        return lambda: self._draw(sampler, self.logits[spread], rows)

    def processing(self, function: Any, state: Any) -> Callable[[], object]:
        """A function that changes logits, and a greedy draw."""
        rows = self._packed()

        def work() -> object:
            nonlocal state
            state, logits = function(state, self.logits[PEAKED], self._last_token, rows)
            return self._draw(self.greedy, logits, rows)

        return work

    def writing(self, write: Any, state: Any, row: Any) -> Callable[[], object]:
        """What a sequence that needs a row of the state costs when it gets its slot."""

        def work() -> object:
            nonlocal state
            state = write(state, np.int32(0), row)
            return state

        return work

    def _draw(self, sampler: str, logits: Any, rows: Any) -> Any:
        token_ids, self._last_token = self.compiled[sampler](logits, self._last_token, rows, self._key)
        return token_ids

    def _packed(self, **columns: float) -> Any:
        values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **columns}
        slots = np.arange(ROWS + 1, dtype=np.int32)
        values |= {"seeds": slots, "needs": Need.BIAS | Need.PENALTIES}
        parameters = np.stack(
            [np.full(ROWS + 1, value, PARAMETERS[name]).view(np.int32) for name, value in values.items()]
        )
        zeros = jnp.zeros(ROWS, jnp.int32)
        return pack_inputs(jnp.asarray(slots[:ROWS]), zeros + 1, zeros, zeros, jnp.asarray(parameters))


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Of each try after a first one that isn't counted."""
    jax.block_until_ready(work())
    tries = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        tries.append(time.perf_counter() - began)
    return tries


if __name__ == "__main__":
    answer_all(_measure)
