"""Run by test_same_bits.py, for each instruction set: how many rows differ in any bit from what they are alone, as JSON.

same_bits.py DIRECTORY CASE...
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import build_checkpoint
from flax import nnx
from loading import load

from engine.devices.mesh import one_device
from engine.models.cpu.rows import CPU_ROWS, prepare
from engine.models.layers.norm import RMSNorm
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.weights import panels
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import tensors
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.new_tokens import last_sampled
from engine.sampling.penalties import Penalties, apply_penalties
from engine.sampling.sampler import SamplingRows, cuts_of, sample
from engine.step.backend_choice import choose_backend
from engine.step.compilation import lower
from engine.step.forward_programs import ForwardPrograms
from engine.step.inputs import layout as step_layout
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes

SEQUENCES, LENGTH, PAGE, PAGES = 4, 40, 16, 3
BUCKETS = (1, 2, 3, 4, 16, 64)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "vocab_size": 1100,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WIDE, VOCABULARY = 2048, 5000
ROWS = 16
"""Of which the functions get 1, 2, 5 and 16 at once."""


class Steps:
    """A model's steps, compiled as they are asked for."""

    def __init__(self, directory: Path, variant: str, dtype: str, *, quantized: bool) -> None:
        build_checkpoint(directory, variant, **SIZES)
        model = read_model_config(directory)
        backend = choose_backend(PAGE, model.head_dim, np.dtype(jnp.dtype(dtype)))
        assert backend.description == "oDriver's CPU kernels"
        activations = np.dtype(np.float32) if quantized else None
        decoder = load(directory, backend.weight_format(np.dtype(jnp.dtype(dtype)), activations))
        one_page = backend.one_page(Partition(model), PAGE, np.dtype(jnp.dtype(dtype)))
        self.groups = len(one_page.windows)
        self.pool = replace(one_page, num_pages=1 + self.groups * SEQUENCES * PAGES)
        self.slots = SlotShapes(SEQUENCES, self.groups, PAGES)
        self.backend, self.step = backend, ForwardPrograms(decoder, backend, self.pool, self.slots, one_device())
        self.tokens = np.random.default_rng(0).integers(0, model.vocab_size, (SEQUENCES, LENGTH))
        self.compiled = {}

    def run(self, schedule):
        """Of each token the hidden state, and the logits where a step has them, by sequence and place."""
        cache, hidden, logits, slots = self.backend.allocate(self.pool), {}, {}, self._with_tables()
        for plan in schedule:
            total = sum(count for _, _, count in plan)
            tokens = next(bucket for bucket in BUCKETS if bucket >= total)
            layout = StepLayout(tokens, min(tokens, SEQUENCES), self.groups)
            if tokens not in self.compiled:
                self.compiled[tokens] = self.step.lower(layout).compile()
            last = self.slots.new_fed()
            packed = self._pack(layout, plan)
            cache, slots, of_rows, of_tokens, _ = self.compiled[tokens](self.step.weights, cache, slots, last, packed)
            at = 0
            for row, (sequence, start, count) in enumerate(plan):
                for place in range(count):
                    hidden[sequence, start + place] = np.asarray(of_tokens)[at + place].tobytes()
                at += count
                logits[sequence, start + count - 1] = np.asarray(of_rows)[row].tobytes()
        return hidden, logits

    def _with_tables(self):
        """The slots of all sequences, which have their pages and no tokens yet."""
        state = self.slots.new_state()
        pages = 1 + np.arange(self.groups * SEQUENCES * PAGES, dtype=np.int32)
        tables = state.page_tables.reshape(self.groups, SEQUENCES + 1, PAGES)
        tables = tables.at[:, :SEQUENCES].set(pages.reshape(self.groups, SEQUENCES, PAGES))
        return replace(state, page_tables=tables.reshape(-1, PAGES))

    def _pack(self, layout, plan):
        packed, at = np.zeros(layout.size, np.int32), 0
        layout.view(packed, "writes")[:] = layout.writes.blank(self.slots)
        layout.view(packed, "slots")[:] = SEQUENCES
        for row, (sequence, start, count) in enumerate(plan):
            layout.view(packed, "token_ids")[at : at + count] = self.tokens[sequence, start : start + count]
            layout.view(packed, "slots")[row] = sequence
            layout.view(packed, "counts")[row] = count
            layout.view(packed, "samples")[row] = 1
            at += count
        return packed


def one_by_one():
    """Each sequence alone, token by token."""
    return [[(sequence, place, 1)] for sequence in range(SEQUENCES) for place in range(LENGTH)]


def random_schedule(seed):
    """Steps of random rows and chunks, those of a single token first, until all is computed."""
    rng, done, schedule = np.random.default_rng(seed), [0] * SEQUENCES, []
    while min(done) < LENGTH:
        left = [sequence for sequence in range(SEQUENCES) if done[sequence] < LENGTH]
        longest, plan = int(rng.choice([1, 5, LENGTH])), []
        for sequence in rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist():
            room = BUCKETS[-1] - sum(count for _, _, count in plan)
            count = min(int(rng.integers(1, longest + 1)), LENGTH - done[sequence], room)
            if count:
                plan.append((sequence, done[sequence], count))
                done[sequence] += count
        schedule.append(sorted(plan, key=lambda chunk: chunk[2] > 1))
    return schedule


def model_differs(directory: Path, variant: str, dtype: str = "float32", *, quantized: bool = False) -> int:
    """Tokens and rows of a model, in random company and chunks."""
    steps = Steps(directory, variant, dtype, quantized=quantized)
    alone = steps.run(one_by_one())
    schedules = [[[(0, 0, LENGTH)]], *map(random_schedule, range(4))]
    return sum(
        those[place] != values
        for schedule in schedules
        for those, found in zip(alone, steps.run(schedule), strict=True)
        for place, values in found.items()
    )


def rows_differ(function, *columns) -> int:
    """Rows of what a function gives for ROWS rows, 1, 2, 5 and all at once."""

    def results(count):
        compiled, found = None, []
        for begin in range(0, ROWS - count + 1, count):
            arguments = jax.tree.map(lambda column: jnp.asarray(column[begin : begin + count]), columns)  # noqa: B023
            compiled = compiled or lower(function, *arguments).compile()
            found += [np.asarray(row).tobytes() for row in compiled(*arguments)]
        return found

    alone = results(1)
    return sum(one != alone[row] for count in (2, 5, ROWS) for row, one in enumerate(results(count)))


def function_differs(name: str) -> int:
    """Rows of one of the step's functions over wide rows."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(ROWS, VOCABULARY)) * np.linspace(0.1, 4, ROWS)[:, None]).astype(np.float32)
    rows = SamplingRows(
        temperature=rng.uniform(0.3, 2, ROWS).astype(np.float32),
        top_k=np.resize([0, 9, 300], ROWS).astype(np.int32),
        top_p=np.resize([0.9, 1, 0.5, 0.99], ROWS).astype(np.float32),
        min_p=np.resize([0, 0, 0, 0, 0.01], ROWS).astype(np.float32),
        seeds=np.arange(ROWS, dtype=np.uint32),
        positions=np.arange(ROWS, dtype=np.int32),
    )
    uncut = {"temperature": np.arange(ROWS) >= 0, "mixed": np.arange(ROWS) % 2 == 0}.get(name.removesuffix(" weights"))
    if uncut is not None:
        whole = {"top_k": np.int32(0), "top_p": np.float32(1), "min_p": np.float32(0)}
        rows = replace(rows, **{name: np.where(uncut, value, getattr(rows, name)) for name, value in whole.items()})
    key = jax.random.key(0)
    if name == "norm":
        prepare()
        make = ParameterFactory(nnx.Rngs(0), 1, 1, {})
        norm = RMSNorm("norm", {"hidden": WIDE}, 1e-6, tensors("norm"), make)
        norm.scale = nnx.Param(jnp.asarray(rng.normal(size=WIDE), jnp.float32))
        x, added = rng.normal(size=(2, ROWS, WIDE)).astype(np.float32)
        return rows_differ(lambda x, added: norm(CPU_ROWS.added(x, added, 1.0), CPU_ROWS), x, added)
    if name == "logprobs":
        return rows_differ(compute_logprobs, logits, np.arange(ROWS, dtype=np.int32))
    if name == "penalties":
        state = Penalties(
            counts=rng.integers(0, 9, (ROWS, VOCABULARY)).astype(np.int32),
            **{kind: rng.uniform(0.5, 2, ROWS).astype(np.float32) for kind in ("presence", "frequency", "repetition")},
        )

        state = jax.tree.map(jnp.asarray, state)

        def penalized(logits, slots):
            return apply_penalties(logits, state, slots, last_sampled(jnp.zeros(ROWS, jnp.int32), slots, slots < 0))[1]

        return rows_differ(penalized, logits, np.arange(ROWS, dtype=np.int32))
    if name.endswith(" weights"):
        return rows_differ(
            lambda logits, rows: cuts_of(logits, jnp.max(logits, axis=-1), rows).weigh(logits), logits, rows
        )
    return rows_differ(lambda logits, rows: sample(logits, rows, key), logits, rows)


def main() -> None:
    """Print what differs in each case."""
    step_layout.LEAST_LOGITS = 1  # as steps have few rows here
    directory, found = Path(sys.argv[1]), {"panel width": panels.panel_width()}
    for name in sys.argv[2:]:
        if name.startswith("model "):
            _, variant, dtype, *rest = name.split()
            found[name] = model_differs(directory / name, variant, dtype, quantized=bool(rest))
        else:
            found[name] = function_differs(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
