"""Whether this machine's kernels compute what they should; those that do not are left to XLA."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from caching.attention.spec import AttentionKernel, AttentionSpec
from caching.attention.twin import Heads, largest_error
from caching.metadata import PagedAttentionCacheMetaData
from engine.hosts.processes import least_of_all
from engine.models.cpu import rows as cpu_rows
from engine.models.cpu.rows import CPU_ROWS
from engine.models.layers.activation import Activation
from engine.models.layers.row_operations import XLA_ROWS
from engine.models.layers.self_attention import SelfAttentionSpec, self_attention
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.models.weights import panels
from engine.models.weights.forms import InStack
from engine.models.weights.int4 import Int4Experts
from engine.models.weights.weight_format import Groups, Layout
from engine.sampling import cpu_sampler
from engine.sampling.cpu_sampler import CPU_SAMPLING
from engine.sampling.logit_bias import LogitBias, neutral_bias
from engine.sampling.logit_floors import MASKED_OUT, REMOVED
from engine.sampling.logprobs import num_columns, unpack_logprobs
from engine.sampling.needs import Need
from engine.sampling.operations import XLA_SAMPLING
from engine.sampling.penalties import GENERATED, Penalties, neutral_penalties
from engine.sampling.sampler_inputs import NUM_FIELDS, PARAMETERS, SamplerInputs
from engine.step.backend import Backend
from engine.step.backend_choice import xla_backend

logger = logging.getLogger(__name__)

EXACT, ROUNDED = 1e-3, 0.1
"""The largest difference from a twin whose results are about 1: in float32, and where inputs or
products are rounded to fewer bits. A key too many, or of another row, makes a difference of 1."""


@dataclass(frozen=True)
class Trial:
    """An attention kernel and what a model asks of it."""

    backend: Backend
    one_page: PagedAttentionCacheMetaData
    specs: tuple[AttentionSpec, ...]
    """Of self-attention; the other layers' attention is XLA's."""
    heads: Heads

    def fault(self) -> str | None:
        """How the kernel differs from its twin; None if it does not."""
        tolerance = tolerance_of(self.one_page.dtype, self.heads.dtype)
        for spec in self.specs:
            attention = cast(AttentionKernel, self.backend.attention)
            error = largest_error(attention, self.backend.allocate, self.one_page, spec, self.heads)
            if not error <= tolerance:
                return f"its results differ from plain attention's by {error:.3g}, more than {tolerance:g}"
        return None


def tolerance_of(kv_dtype: np.dtype, dtype: np.dtype) -> float:
    """EXACT or ROUNDED, by the dtypes of pages and activations."""
    is_narrow = kv_dtype.itemsize < 4 or dtype.itemsize < 4
    return ROUNDED if is_narrow or jax.default_backend() != "cpu" else EXACT


def trial_of(
    backend: Backend,
    partition: Partition,
    page_size: int,
    dtype: np.dtype,
    kv_dtype: np.dtype,
    reader: ModelSpec | None,
) -> Trial:
    """What a device's part of a model asks of a backend's kernel, and a ``reader`` of its pages."""
    model = partition.model
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, SelfAttentionSpec)]
    num_heads = max((mixer.num_heads for mixer in mixers), default=0)
    sinks = any(mixer.sinks for mixer in mixers)
    heads = Heads(num_heads // partition.devices, partition.kv_heads_each, model.head_dim, dtype, sinks)
    reading = [] if reader is None else [self_attention(block) for block in reader.blocks]
    specs = tuple(dict.fromkeys(mixer.scores for mixer in (*mixers, *reading)))
    return Trial(backend, backend.one_page(partition, page_size, kv_dtype), specs, heads)


@cache
def checked(trial: Trial, kv_dtype: np.dtype, *, int4_experts: bool = False) -> Backend:
    """The backend, with XLA's operations in the place of kernels that differ from their twins, or
    fail. On several hosts every process must call this, and a fault of one holds for all.

    ``int4_experts`` are to be served, if the backend can: it may be that they get 8 bits.
    """
    backend, xla = trial.backend, xla_backend(kv_dtype)
    if trial.specs and backend.attention != xla.attention and (why := _fault("attention", trial.fault)):
        words = f"{xla.description}, in the place of {backend.description}: {why}"
        backend = replace(backend.with_attention_of(xla, words), replaced=("attention",))
    if backend.layout is Layout.PANELS and (why := _fault("matrix product", product_fault)):
        words = f"{backend.description}; matrix products by XLA: {why}"
        replaced = (*backend.replaced, "matrix product")
        backend = replace(backend, description=words, layout=xla.layout, skips_padding=False, replaced=replaced)
    if backend.rows != XLA_ROWS and (why := _fault("norm", rows_fault)):
        words = f"{backend.description}; norms, gates and additions by XLA: {why}"
        backend = replace(backend, description=words, rows=XLA_ROWS, replaced=(*backend.replaced, "norm"))
    if backend.sampling != XLA_SAMPLING and (why := _fault("sampling", sampling_fault)):
        words = f"{backend.description}; what is between logits and tokens by XLA: {why}"
        replaced = (*backend.replaced, "sampling")
        backend = replace(backend, description=words, sampling=XLA_SAMPLING, replaced=replaced)
    if int4_experts and backend.layout is Layout.MATRIX and (why := _fault("int4 experts", experts_fault)):
        words, replaced = f"{backend.description}; experts in 8 bits: {why}", (*backend.replaced, "int4 experts")
        backend = replace(backend, description=words, least_expert_bits=8, replaced=replaced)
    return backend


def _fault(name: str, fault: Callable[[], str | None]) -> str | None:
    """The fault of a kernel on any host, which is logged."""
    try:
        why = fault()
    except Exception as error:  # a kernel that cannot be compiled here is no reason not to serve
        logger.debug("the %s kernel fails", name, exc_info=True)
        why = f"it fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if least_of_all(int(why is None)):
        return None
    why = why or "it is at fault on another host"
    logger.error(
        "THE %s KERNEL IS REPLACED by XLA's operations, which are slower: %s. Please report this, with what "
        "`odriver doctor --tpu` says",
        name.upper(), why,
    )  # fmt: skip
    return why


def product_fault() -> str | None:
    """Of the CPU's matrix products, with weights of each form, for one row and for several.

    Raises KernelsUnavailable.
    """
    depth, out = 96, 2 * panels.panel_width() + 3
    random = np.random.default_rng(0)
    x = random.standard_normal((9, depth)).astype(np.float32) / np.float32(depth**0.5)
    whole, ones = random.standard_normal((out, depth)), np.ones(out)
    scales = np.linspace(0.5, 2, out).astype(np.float32) / 8
    eighths = np.round(8 * whole).clip(-127, 127).astype(np.int8)
    halves, in_groups = np.round(2 * whole).clip(-8, 7).astype(np.int8), np.repeat(2 * scales[:, None], 3, axis=1)
    none = np.zeros(0, np.float32)
    weights = {
        "float32": (whole, ones, panels.as_panels(whole.astype(np.float32)), none),
        "bfloat16": (whole.astype(jnp.bfloat16), ones, panels.as_panels(whole.astype(jnp.bfloat16)), none),
        "int8": (eighths, scales, panels.as_panels(eighths), scales),
        "4 bits": (halves, 2 * scales, panels.as_panels4(halves), panels.as_panels(in_groups)),
    }
    found = jax.jit(lambda x, packed: [_products(x, kernel, out, by) for kernel, by in packed])(
        x, [(kernel, by) for _, _, kernel, by in weights.values()]
    )
    for (name, (weight, scale, _, _)), results in zip(weights.items(), found, strict=True):
        expected = x.astype(np.float64) @ weight.astype(np.float64).T * scale
        error = np.max([np.abs(np.asarray(result) - expected[: len(result)]).max() for result in results])  # NaN of any
        if not error <= EXACT:
            return f"products with {name} differ from numpy's by {error:.3g}, more than {EXACT:g}"
    return None


def _products(x: jax.Array, kernel: jax.Array, out: int, scales: jax.Array) -> tuple[jax.Array, ...]:
    """f32[rows, out] of all rows, of the first alone, and of all with a kernel before this one."""
    sizes, kernels = jnp.asarray([0, len(x)], np.int32), jnp.stack([jnp.zeros_like(kernel), kernel])
    grouped = panels.grouped_product(x, kernels, sizes, out, jnp.stack([scales, scales]))
    return panels.product(x, kernel, out, scales), panels.product(x[:1], kernel, out, scales), grouped


def rows_fault() -> str | None:
    """Of what a CPU computes between products, for rows that fill no whole vectors. Raises
    KernelsUnavailable."""
    cpu_rows.prepare()
    x, y, scale = np.random.default_rng(0).standard_normal((3, 83)).astype(np.float32)
    apart, logistic = x - x.mean(), 1 / (1 + np.exp(-x))
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    expected = {
        "norm": x / np.sqrt((x**2).mean() + 1e-5) * scale,
        "centered norm": apart / np.sqrt((apart**2).mean() + 1e-5) * scale,
        "silu": x * logistic * y,
        "gelu": x / 2 * (1 + tanh) * y,
        "addition": x + y / 2,
    }

    def computed(x: jax.Array, y: jax.Array, scale: jax.Array, both: jax.Array) -> list[jax.Array]:
        norms = [CPU_ROWS.normed(x, scale, 1e-5, centered=centered) for centered in (False, True)]
        gated = [CPU_ROWS.gated(both, activation) for activation in (Activation.SILU, Activation.GELU_TANH)]
        return [*norms, *gated, CPU_ROWS.added(x, y, 0.5)]

    # loops of XLA's would have to be compiled
    return _difference(expected, jax.jit(computed)(x, y, scale, np.stack([x, y])))


def sampling_fault() -> str | None:
    """Of what is between logits and tokens on a CPU. Raises KernelsUnavailable."""
    cpu_sampler.prepare()
    return _changes_fault() or _draw_fault()


def _changes_fault() -> str | None:
    """Of what changes logits before a draw, for a row that fills no whole vectors."""
    random, vocab, new, banned = np.random.default_rng(0), 83, 81, 82
    logits, values = random.standard_normal((2, vocab)).astype(np.float32)
    bias, penalties = neutral_bias(vocab), neutral_penalties(vocab)
    bias.values[:], bias.banned_ids[0], bias.banned_after[0, -1] = values, banned, new
    penalties.counts[:] = random.integers(0, 7, vocab)
    penalties = replace(penalties, presence=np.float32(0.5), frequency=np.float32(0.25), repetition=np.float32(1.5))
    counts = penalties.counts + GENERATED * (np.arange(vocab) == new)
    repeated = np.where(counts > 0, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    expected = {
        "bias": np.where(np.arange(vocab) == banned, REMOVED, logits + values),
        "penalties": repeated - 0.25 * (counts // GENERATED) - 0.5 * (counts >= GENERATED),
        "mask": np.where(np.arange(vocab) % 3, logits, MASKED_OUT),
        "count of tokens": counts,
    }
    masks = np.packbits(np.arange(96) % 3 > 0, bitorder="little").view(np.int32)[None]
    packed = np.zeros((NUM_FIELDS, 1), np.int32)
    packed[1:3] = 1  # it samples, and decodes
    packed[NUM_FIELDS - len(PARAMETERS) + [*PARAMETERS].index("needs")] = Need.BIAS | Need.PENALTIES

    def computed(logits: jax.Array, bias: LogitBias, penalties: Penalties, packed: jax.Array) -> list[jax.Array]:
        inputs, fed = SamplerInputs.unpack(packed, num_slots=2), jnp.asarray([new, 0], np.int32)
        _, biased = CPU_SAMPLING.apply_bias(logits, bias, inputs, fed)
        after, penalized = CPU_SAMPLING.apply_penalties(logits, penalties, inputs, fed)
        return [biased, penalized, CPU_SAMPLING.mask_logits(logits, jnp.asarray(masks)), after.counts]

    states = [jax.tree.map(lambda leaf: np.stack([leaf, leaf]), state) for state in (bias, penalties)]
    results = jax.jit(computed)(logits[None], *states, packed)
    return _difference(expected, [found[0] for found in map(np.asarray, results)])


DRAWS = {
    "temperature": (0, 1, 1, 2, 1, 1, 1),
    "top_k": (0, 0, 0, 0, 5, 0, 0),
    "top_p": (1, 1, 1, 1, 1, 0.3, 1),
    "min_p": (0, 0, 0, 0, 0, 0, 0.4),
    "seeds": (0, 0, 2**32 - 1, 2, 3, 4, 2),
}
"""Rows of the same logits that each ask for something else, without which their token would be another."""
DRAWN = (30, 281, 221, 78, 60, 221, 68)
"""What ``sampler.sample`` draws for them, which takes seconds to compile. No random number is within a
thousandth of another token's, so that rounding makes no difference."""


def _draw_fault() -> str | None:
    """Of greedy and drawn tokens, and their log-probabilities, in a few blocks of tokens and a part of
    one, of which several are as likely as the best."""
    places = np.arange(300)
    logits = (places * 37 % 101 / 16).astype(np.float32)
    packed = np.zeros((NUM_FIELDS, len(DRAWN)), np.int32)
    packed[0], packed[1], packed[3] = np.arange(len(DRAWN)), 1, 7  # slots, which sample behind 7 tokens
    for number, (name, dtype) in enumerate(PARAMETERS.items(), NUM_FIELDS - len(PARAMETERS)):
        packed[number] = np.array(DRAWS.get(name, 0), dtype).view(np.int32)

    def computed(logits: jax.Array, packed: jax.Array, last: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        inputs = SamplerInputs.unpack(packed, num_slots=len(last))
        tokens, last = CPU_SAMPLING.draw(logits, inputs, last, jax.random.wrap_key_data(key))
        return tokens, last, CPU_SAMPLING.compute_logprobs(logits, tokens)

    alike, last = np.broadcast_to(logits, (len(DRAWN), len(logits))), np.zeros(len(DRAWN) + 1, np.int32)
    *tokens, logprobs = map(np.asarray, jax.jit(computed)(alike, packed, last, np.array([1, 2], np.uint32)))
    likeliest = np.argsort(-logits, kind="stable")[: num_columns(len(logits)) // 2 - 1]
    every = logits - np.log(np.exp(logits).sum())
    rows = [unpack_logprobs(row, token, len(likeliest)) for row, token in zip(logprobs, DRAWN, strict=True)]
    expected = {
        "draw": np.array(DRAWN),
        "last token": np.array([*DRAWN, 0]),
        "log-probability": np.array([every[[token, *likeliest]] for token in DRAWN]),
        "rank": np.array([1 + (logits > logits[token]).sum() for token in DRAWN]),
        "likeliest token": np.array([[token, *likeliest] for token in DRAWN]),
    }
    of_rows = ([row.logprobs for row in rows], [row.ranks[0] for row in rows], [row.token_ids for row in rows])
    return _difference(expected, [*tokens, *map(np.array, of_rows)])


def _difference(expected: Mapping[str, np.ndarray], results: Iterable[np.ndarray | jax.Array]) -> str | None:
    """The first of a kernel's results that is not numpy's, by name."""
    for (name, right), found in zip(expected.items(), results, strict=True):
        error = np.abs(np.asarray(found) - right).max()  # NaN of any
        if not error <= EXACT:
            return f"{name} differs from numpy's by {error:.3g}, more than {EXACT:g}"
    return None


def experts_fault() -> str | None:
    """Of the TPU's product of experts in 4 bits, in the second of two layers."""
    random, inputs, columns, group = np.random.default_rng(0), 192, 256, 64
    numbers = random.integers(-8, 8, (2, 3, inputs, columns))
    scales = random.integers(1, 5, (2, 3, 8, columns)) / 16
    x = (random.integers(-8, 9, (9, inputs)) / 64).astype(jnp.bfloat16)
    weight = Int4Experts(
        jnp.asarray(numbers).astype(jnp.int4), jnp.asarray(scales, x.dtype), Layout.MATRIX, (columns,), group
    )
    of_row = np.repeat([0, 2], [4, 3])
    groups = Groups(jnp.asarray([4, 0, 3], jnp.int32), jnp.asarray([*of_row, 2, 2], jnp.int32))
    product = jax.jit(lambda weight, x: InStack(weight, jnp.int32(1)).grouped_product(x, groups))
    kernels = numbers[1] * scales[1, :, : inputs // group].repeat(group, 1)
    expected = np.einsum("ri,rio->ro", x[: len(of_row)].astype(np.float64), kernels[of_row])
    error = np.abs(np.asarray(product(weight, jnp.asarray(x)))[: len(of_row)] - expected).max()
    return None if error <= EXACT else f"products differ from numpy's by {error:.3g}, more than {EXACT:g}"
