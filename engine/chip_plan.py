"""What serving on a TPU would be like, found out without one: memory by its compiler, time by what the chip can move."""

import re
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.tpu_attention import block_pages
from caching.tpu_chip import CHIPS, Chip
from engine.backend import TPU_PAGE_SIZE, tpu_backend
from engine.buckets import covering_buckets
from engine.build import asked_context, check_page_table, fitting_context
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.execution_manager import StepShapes
from engine.memory import ACCELERATOR_UTILIZATION, CachePlanner
from engine.model_step import ModelStep, scratch_bytes
from engine.models.config import ModelConfig
from engine.models.families import read_config_file
from engine.models.weights import abstract_decoder, parameter_bytes
from engine.progress import Progress
from engine.topology import chips_of, compiling_for, placed

COPY = re.compile(r"= \(?(\w+)\[([\d,]*)\]\{([^}]*)\}[^=]*? copy(?:-start)?\(")
"""A copy in a compiled program: the dtype, shape and layout of what it makes. In the layout, S(n) is a memory on the chip."""
ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4}
LARGE = 2**20
"""Bytes from which on an array is looked for among the copies."""


class CompiledBucket(msgspec.Struct, frozen=True):
    """What the compiler says of a step of so many tokens."""

    tokens: int
    compile_seconds: float
    scratch_bytes: int
    """What it takes beside weights and pages."""
    copies: int
    """Copies it makes in HBM of something as large as a layer's pages or as a weight; there should be none."""


class DecodeStep(msgspec.Struct, frozen=True):
    """What a step of one token for each of so many sequences comes to, at best."""

    sequences: int
    bytes_needed: int
    """Weights, the keys and values that the sequences have, and logits."""
    bytes_moved: int
    """The same with whole blocks of padded pages, as the attention kernel reads them."""
    bandwidth_seconds: float
    compute_seconds: float
    tokens_per_second: float
    """By the slower of the two."""


class ChipPlan(msgspec.Struct, frozen=True):
    """Everything about a model on one chip. Bytes, unless a name says otherwise."""

    model: str
    topology: str
    chip: str
    hbm: int
    budget: int
    """What may be used of it."""
    weights: int
    scratch: int
    """Kept free for the largest step and the sampler."""
    pages: int
    num_pages: int
    page_size: int
    """Tokens in a page."""
    context_tokens: int
    """That fit in all pages together."""
    max_model_len: int
    """Tokens."""
    tokens_a_sequence: int
    """What the steps below are reckoned for."""
    buckets: list[CompiledBucket]
    decode: list[DecodeStep]


def plan_chip(
    config: EngineConfig, path: Path, topology: str, tokens_a_sequence: int, report: Callable[[Progress], None]
) -> ChipPlan:
    """Compile the steps that a daemon would for one chip of a topology. ``path`` is a config.json; no weights are needed.

    Raises ConfigurationError, with the arithmetic, where the model does not fit.
    """
    device = chips_of(topology)[0]
    if device.device_kind not in CHIPS:
        raise ConfigurationError(f"nothing is known of {device.device_kind}: known are {', '.join(CHIPS)}")
    chip, model, dtype = CHIPS[device.device_kind], read_config_file(path), np.dtype(config.dtype or jnp.bfloat16)
    backend = tpu_backend(chip)
    one_page = backend.one_page(model, config.page_size or TPU_PAGE_SIZE, dtype)
    budget = int(chip.hbm_bytes * (config.hbm_utilization or ACCELERATOR_UTILIZATION))
    weights = parameter_bytes(model, dtype)
    planner = CachePlanner(config, model, asked_context(config, model), one_page, weights, budget)
    metadata = planner.plan()
    context = fitting_context(config, asked_context(config, model), metadata)
    check_page_table(config, backend, pages_for(context, metadata.page_size))
    shapes = StepShapes(config.max_num_seqs, config.max_num_batched_tokens, context, metadata)
    cache = backend.abstract_cache(metadata)
    step = ModelStep(abstract_decoder(model, dtype, backend.prepare), backend.attention, cache, config.max_num_seqs)
    sizes = {leaf.size * leaf.dtype.itemsize for leaf in (*step.weights, *jax.tree.leaves(cache))}
    buckets = []
    tokens = covering_buckets(shapes.buckets)
    for done, count in enumerate(tokens):
        report(Progress("compiling", done, len(tokens), "functions"))
        begun = time.perf_counter()
        with compiling_for(device):
            compiled = step.lower(shapes.layout(count), partial(placed, chip=device)).compile()
        seconds = time.perf_counter() - begun
        copies = count_copies(compiled.as_text() or "", {size for size in sizes if size >= LARGE})
        buckets.append(CompiledBucket(count, seconds, scratch_bytes(compiled), copies))
    report(Progress("compiling", len(tokens), len(tokens), "functions"))
    planner.count_scratch(max(bucket.scratch_bytes for bucket in buckets))
    metadata = planner.plan()
    reckoned = min(tokens_a_sequence, context)
    return ChipPlan(
        model=str(path),
        topology=topology,
        chip=device.device_kind,
        hbm=chip.hbm_bytes,
        budget=budget,
        weights=weights,
        scratch=planner.reserved,
        pages=metadata.num_bytes,
        num_pages=metadata.num_pages,
        page_size=metadata.page_size,
        context_tokens=metadata.num_usable_tokens,
        max_model_len=context,
        tokens_a_sequence=reckoned,
        buckets=buckets,
        decode=[
            decode_step(model, metadata, chip, weights, sequences, reckoned, shapes.pages_per_seq)
            for sequences in batch_sizes(config.max_num_seqs)
            if sequences * pages_for(reckoned, metadata.page_size) <= metadata.num_usable_pages
        ],
    )


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of four, and the most."""
    return sorted({4**power for power in range(10) if 4**power < max_num_seqs} | {max_num_seqs})


def count_copies(program: str, sizes: set[int]) -> int:
    """How many copies in a compiled program make an array of one of these sizes outside the chip's own memories."""
    found = [
        prod(map(int, shape.split(","))) * ITEM_BYTES.get(dtype, 0)
        for dtype, shape, layout in COPY.findall(program)
        if shape and "S(" not in layout
    ]
    return sum(size in sizes for size in found)


def decode_step(
    model: ModelConfig,
    metadata: PagedAttentionCacheMetaData,
    chip: Chip,
    weights: int,
    sequences: int,
    tokens: int,
    pages_per_seq: int,
) -> DecodeStep:
    """A step of sequences that hold so many tokens each, on a chip that does nothing but move and multiply."""
    item, table = metadata.dtype.itemsize, model.vocab_size * model.hidden_size
    read = weights - (0 if model.tied_embeddings else table * item)  # of the embedding only a row for each token
    pool = jax.ShapeDtypeStruct((1, metadata.page_size, 2 * metadata.num_kv_heads, metadata.head_dim), metadata.dtype)
    block = block_pages(chip, pool, pages_per_seq) * metadata.page_size
    seen = sum(min(tokens, model.window(layer) or tokens) for layer in range(model.num_layers))
    key_and_value = 2 * model.num_kv_heads * model.head_dim * item
    whole_blocks = -(-tokens // block) * block * metadata.bytes_per_page // metadata.page_size
    logits = 4 * sequences * model.vocab_size
    needed = read + sequences * seen * key_and_value + logits
    moved = read + sequences * whole_blocks + logits
    flops = sequences * (2 * read // item + 4 * model.num_heads * model.head_dim * seen)
    bandwidth, compute = moved / chip.hbm_bandwidth, flops / chip.bf16_flops
    return DecodeStep(sequences, needed, moved, bandwidth, compute, sequences / max(bandwidth, compute))
