"""A mixture of experts computes what its description says, whatever its form, split and company."""

from dataclasses import dataclass, field, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from plain_attention import DenseAttention
from plain_experts import mixed

from caching.cpu_kernels import KernelsUnavailable
from engine.devices.mesh import DeviceMesh, one_device
from engine.models.layers.activation import Activation, ClampedGate
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsMLP, ExpertsSpec, one_by_one, stacked
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import UnsupportedError
from engine.models.step_context import StepContext
from engine.models.weights import panels
from engine.models.weights.factory import ParameterFactory, declared
from engine.models.weights.forms import Dense, InStack, Scaled
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.pieces import assemble
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.weight_format import Groups, Layout, WeightFormat

HIDDEN, TOKENS = 8, 6
FLOAT32 = np.dtype(np.float32)
try:
    HAS_PANELS = panels.panel_width() > 0
except KernelsUnavailable:
    HAS_PANELS = False


def build_mlp(spec, devices=1, seed=0):
    """The module, its parameters random."""
    rng = np.random.default_rng(seed)
    mlp = nnx.eval_shape(lambda: ExpertsMLP(spec, HIDDEN, ParameterFactory(nnx.Rngs(0), devices, 1, {})))
    state = nnx.state(mlp)
    random = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape).astype(np.float32)), state)
    nnx.update(mlp, random)
    return mlp


def weights_of(mlp):
    """Its parameters by the names of plain_experts.py, float64."""
    router, shared, norms = mlp.router, mlp.shared, mlp.norms
    arrays = {
        "router": router.kernel.get_value().values,
        "router_bias": router.bias,
        "correction": router.correction,
        "expert_scale": router.expert_scale,
        "router_norm": router.norm and router.norm.scale,
        "gate_up": mlp.gate_up_kernel.get_value().values,
        "gate_up_bias": mlp.gate_up_bias,
        "down": mlp.down_kernel.get_value().values,
        "down_bias": mlp.down_bias,
        "shared_gate_up": shared and shared.gate_up_kernel.get_value().values,
        "shared_down": shared and shared.down_kernel.get_value().values,
        "shared_gate": mlp.shared_gate if mlp.shared_gate is None else mlp.shared_gate.get_value().values,
    }
    found = {name: np.asarray(value[...], np.float64) for name, value in arrays.items() if value is not None}
    if norms is not None:
        names = ("shared", "experts", "shared_post", "experts_post")
        found["norms"] = {name: np.asarray(getattr(norms, name).scale[...], np.float64) for name in names}
    return found


def context(num_tokens=None):
    """A step of so many tokens."""
    return StepContext((), DenseAttention(), num_tokens)


compute = nnx.jit(lambda mlp, x, num_tokens: mlp(x, context(num_tokens)))


ROUTERS = {
    "scoring": st.sampled_from(Scoring),
    "normalised": st.booleans(),
    "scale": st.sampled_from([1.0, 2.5]),
    "best_of_group": st.sampled_from([1, 2]),
    "correction": st.booleans(),
    "bias": st.booleans(),
    "weighs_input": st.booleans(),
    "norm_eps": st.sampled_from([None, 1e-6]),
    "expert_scale": st.booleans(),
    "jitter": st.sampled_from([0.0, 0.01, 0.4]),
    "least_sum": st.sampled_from([1e-20, 0.1]),
}
"""The fields of a router that do not depend on each other."""
SHARED = {
    "intermediate_size": st.just(4),
    "activation": st.sampled_from(Activation),
    "gated": st.booleans(),
    "gate_scale": st.sampled_from([1.0, 0.7]),
}


@st.composite
def specs(draw):
    """Every kind of router and expert, one expert alone and all of them chosen included."""
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    experts = 8 if groups > 1 else draw(st.sampled_from([1, 8, 8]))
    used = draw(st.integers(1, groups))
    chosen = min(draw(st.sampled_from([1, 2, experts])), used * experts // groups)
    router = RouterSpec(groups=groups, groups_per_token=used, **{name: draw(each) for name, each in ROUTERS.items()})
    activation = draw(st.sampled_from([*Activation, ClampedGate(1.702, 0.5)]))
    is_gated = isinstance(activation, ClampedGate) or draw(st.booleans())
    shared = draw(st.none() | st.builds(GatedSpec, **SHARED))
    has_gate, norms = shared is not None and draw(st.booleans()), draw(st.sampled_from([None, 1e-6]))
    return ExpertsSpec(
        4,
        experts,
        chosen,
        router,
        activation,
        bias=is_gated and draw(st.booleans()),
        gated=is_gated,
        shared=shared,
        shared_gate=has_gate,
        branch_norm_eps=norms if shared else None,
    )


def test_every_field_is_drawn():
    """But for what no shared expert has: plain_experts.py knows each, and no new one is first met by chance."""
    assert {each.name for each in fields(RouterSpec)} == {*ROUTERS, "groups", "groups_per_token"}
    assert {each.name for each in fields(GatedSpec)} == {*SHARED, "bias", "xielu"}
    assert {spec.router.scoring for spec in AS_IN.values()} == set(Scoring)


AS_IN = {
    "mixtral": ExpertsSpec(4, 8, 2),
    "qwen2_moe": ExpertsSpec(4, 8, 3, RouterSpec(normalised=False), shared=GatedSpec(6), shared_gate=True),
    "gpt_oss": ExpertsSpec(
        4, 8, 2, RouterSpec(Scoring.SOFTMAX_OF_CHOSEN, bias=True), ClampedGate(1.702, 0.5), bias=True
    ),
    "glm4_moe": ExpertsSpec(
        4,
        8,
        2,
        RouterSpec(Scoring.SIGMOID, scale=2.5, groups=4, groups_per_token=2, correction=True),
        shared=GatedSpec(4),
    ),
    "llama4": ExpertsSpec(
        4, 8, 1, RouterSpec(Scoring.SIGMOID, normalised=False, weighs_input=True), shared=GatedSpec(6)
    ),
    "phimoe": ExpertsSpec(4, 8, 2, RouterSpec(Scoring.SPARSE_MIXER, jitter=0.2)),
    "nemotron_h": ExpertsSpec(
        4,
        8,
        2,
        RouterSpec(Scoring.SIGMOID, correction=True),
        Activation.RELU_SQUARED,
        gated=False,
        shared=GatedSpec(6, activation=Activation.RELU_SQUARED, gated=False),
    ),
    "gemma4": ExpertsSpec(
        4, 8, 2, RouterSpec(norm_eps=1e-6, expert_scale=True), shared=GatedSpec(6), branch_norm_eps=1e-6
    ),
}


@pytest.mark.parametrize("family", AS_IN)
def test_experts_of_a_family_compute_what_it_does(family):
    """The last row is padding, and one is no number, which is nothing to the others."""
    mlp, x = build_mlp(AS_IN[family]), np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    expected, _ = mixed(AS_IN[family], weights_of(mlp), x)
    x[2] = np.nan

    actual = np.asarray(compute(mlp, jnp.asarray(x), jnp.int32(5)))

    np.testing.assert_allclose(actual[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@given(spec=specs(), seed=st.integers(0, 99), tied=st.booleans(), real=st.integers(0, TOKENS))
def test_experts_compute_what_their_description_says(spec, seed, tied, real):
    """A row of zeros, where all scores may be equal, and experts with the same router among them; the rest is padding."""
    mlp, rng = build_mlp(spec, seed=seed), np.random.default_rng(seed)
    if tied:
        kernel = mlp.router.kernel.get_value()
        mlp.router.kernel.set_value(replace(kernel, values=kernel.values.at[:, -1].set(kernel.values[:, 0])))
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    x[1] = 0

    with np.errstate(invalid="ignore"):
        expected, gap = mixed(spec, weights_of(mlp), x)
    assume(gap > 1e-5)
    actual = np.asarray(mlp(jnp.asarray(x), context(jnp.int32(real))))

    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual[:real], expected[:real], atol=1e-4, rtol=1e-4)


def as_form(numbers, layout, dtype=FLOAT32, *, quantized=False):
    """Kernels f32[experts, in, 2, out] as they are served in a layout, int8 or of a dtype."""
    axes = tuple(zip(("experts", "hidden", "gate_up", "ffn"), numbers.shape, strict=True))
    parameter = Parameter("", Role.EXPERTS, axes, tensors(""), inputs=1)
    form = WeightFormat(dtype, layout, activations=dtype if quantized else None)
    flat = numbers.reshape(*numbers.shape[:2], -1) if layout is Layout.MATRIX else numbers
    return (Scaled if quantized else Dense).made_of(jnp.asarray(flat, dtype), parameter, form, one_device())


@pytest.mark.parametrize("sizes", [(3, 0, 2, 0), (0, 0, 0, 5), (0, 0, 0, 0), (9, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("layout", Layout)
def test_each_row_is_multiplied_by_its_expert(layout, quantized, sizes):
    """Experts without rows, all rows for one of them, rows behind all groups; columns that fill no panel."""
    if layout is Layout.PANELS and not HAS_PANELS:
        pytest.skip("no C++ compiler")
    rng = np.random.default_rng(0)
    numbers, x = rng.normal(size=(4, 10, 2, 9)).astype(np.float32), rng.normal(size=(9, 10)).astype(np.float32)
    numbers[2, :, 0, 3] = 0
    experts = np.repeat(np.arange(4), sizes)
    groups = Groups(jnp.asarray(sizes, jnp.int32), jnp.asarray(np.resize([*experts, *[3] * 9], 9), jnp.int32))

    weight = as_form(numbers, layout, quantized=quantized)
    found = np.asarray(weight.grouped_product(jnp.asarray(x), groups))[: len(experts)]

    scales = np.abs(numbers).max(axis=1, keepdims=True) / 127
    exact = np.rint(numbers / np.where(scales, scales, 1)) * scales if quantized else numbers
    expected = [x[row] @ exact[expert].reshape(10, -1) for row, expert in enumerate(experts)]
    np.testing.assert_allclose(found, np.reshape(expected, (-1, 18)), atol=1e-4)
    assert weight.out == (2, 9)


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
def test_a_layer_of_a_stack_is_multiplied_as_if_it_were_alone(quantized):
    """Whichever of the layers it is."""
    rng = np.random.default_rng(0)
    layers, x = rng.normal(size=(3, 4, 10, 2, 9)).astype(np.float32), rng.normal(size=(6, 10)).astype(np.float32)
    groups = Groups(jnp.asarray([1, 0, 3, 2], jnp.int32), jnp.asarray([0, 2, 2, 2, 3, 3], jnp.int32))
    alone = [as_form(layer, Layout.MATRIX, quantized=quantized) for layer in layers]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)

    for place, weight in enumerate(alone):
        found = InStack(stack, jnp.int32(place)).grouped_product(jnp.asarray(x), groups)

        np.testing.assert_allclose(found, weight.grouped_product(jnp.asarray(x), groups), atol=1e-6)


SPLIT = {
    "experts": ExpertsSpec(6, 4, 2, bias=True, shared=GatedSpec(4), shared_gate=True),
    "columns": ExpertsSpec(6, 3, 2, bias=True, shared=GatedSpec(4), branch_norm_eps=1e-6),
    "tiles": ExpertsSpec(256, 4, 2),
}


@pytest.mark.parametrize("name", SPLIT)
def test_two_devices_say_what_one_says(name):
    """Each has some of the experts, or some columns of each, and they add up biases once."""
    spec, mesh = SPLIT[name], DeviceMesh(tuple(jax.devices()[:2]))
    alone, parts = build_mlp(spec), build_mlp(spec, devices=2)
    graph, state = nnx.split(parts)
    specs = jax.tree.map(
        lambda variable: variable.replace(PartitionSpec(*declared(variable).served_split)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    x = np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32)

    def run(state, x):
        return nnx.merge(graph, state)(x, context(jnp.int32(5)))

    found = jax.jit(mesh.on_each(run, (specs, PartitionSpec()), PartitionSpec()))(state, x)

    assert spec.splits_columns(2) is (name != "experts")
    np.testing.assert_allclose(found[:5], compute(alone, jnp.asarray(x), None)[:5], atol=1e-5)


def test_padding_and_other_devices_experts_wake_none(monkeypatch):
    """Their rows are in no group, and so no expert is read for them."""
    seen, product = [], Dense.grouped_product
    monkeypatch.setattr(
        Dense, "grouped_product", lambda form, x, groups: seen.append(groups.sizes) or product(form, x, groups)
    )
    mlp = build_mlp(ExpertsSpec(4, 8, 3))

    mlp(jnp.ones((TOKENS, HIDDEN)), context(jnp.int32(0)))
    mlp(jnp.ones((TOKENS, HIDDEN)), context(jnp.int32(2)))
    mlp(jnp.ones((TOKENS, HIDDEN)), context())

    nothing, two, every = (sorted(sizes.tolist())[::-1] for sizes in seen[::2])
    assert nothing == [0] * 8
    assert two == [2] * 3 + [0] * 5
    assert every == [TOKENS] * 3 + [0] * 5


STORED = {
    "one by one": (one_by_one("mlp.experts.", "gate_proj", "up_proj", "down_proj"), None, None),
    "stacked": (stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), (0, 2, 3, 1), (0, 2, 1)),
    "interleaved": (
        stacked(
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            stored="experts hidden (ffn gate_up)",
            down_stored="experts ffn hidden",
        ),
        (0, 1, 3, 2),
        (0, 1, 2),
    ),
}


@dataclass(frozen=True)
class RecordingArrays(Arrays):
    """A source that knows what was read of it."""

    reads: list = field(default_factory=list)

    def read(self, name, index):
        """See TensorSource."""
        part = super().read(name, index)
        self.reads.append((name, part.size))
        return part


@pytest.mark.parametrize("name", STORED)
def test_a_device_reads_its_experts_alone(name):
    """However a checkpoint has them: a tensor each, one of all, or one with gates and ups in turns."""
    rules, order, down_order = STORED[name]
    mlp = ExpertsMLP(ExpertsSpec(6, 4, 2), HIDDEN, ParameterFactory(nnx.Rngs(0), 2, 1, rules))
    gate_up, down = (declared(kernel) for kernel in (mlp.gate_up_kernel, mlp.down_kernel))
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(4, HIDDEN, 2, 6)).astype(np.float32), rng.normal(size=(4, 6, HIDDEN)).astype(np.float32)
    prefix = "model.layers.3.mlp.experts."
    if order is None:
        arrays = {
            f"{prefix}{expert}.{part}_proj.weight": kernels[0][expert, :, number].T
            for number, part in enumerate(("gate", "up"))
            for expert in range(4)
        } | {f"{prefix}{expert}.down_proj.weight": kernels[1][expert].T for expert in range(4)}
    else:
        stored = kernels[0].transpose(order)
        joined = (4, 12, HIDDEN) if name == "stacked" else (4, HIDDEN, 12)
        arrays = {
            f"{prefix}gate_up_proj": stored.reshape(joined),
            f"{prefix}down_proj": kernels[1].transpose(down_order),
        }

    for parameter, whole in zip((gate_up, down), kernels, strict=True):
        source = RecordingArrays(arrays)
        part = assemble(source, parameter, 3, (slice(2, 4), *[slice(None)] * (whole.ndim - 1)), FLOAT32)

        np.testing.assert_array_equal(part, whole[2:])
        assert sum(size for _, size in source.reads) == whole[2:].size


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (lambda: ExpertsSpec(4, 8, 9), "9 experts a token are more than the 8 experts"),
        (lambda: ExpertsSpec(4, 8, 2, RouterSpec(groups=3)), "3 groups do not divide the 8 experts"),
        (
            lambda: ExpertsSpec(4, 8, 2, RouterSpec(groups=2, groups_per_token=3)),
            "3 groups a token are more than the 2",
        ),
        (lambda: ExpertsSpec(4, 8, 3, RouterSpec(groups=4)), "3 experts a token are more than those of 1 groups of 2"),
        (lambda: ExpertsSpec(4, 8, 1, RouterSpec(groups=8)), "groups of 1 experts are scored by their best 2"),
        (lambda: ExpertsSpec(4, 8, 1, shared=GatedSpec(4, bias=True)), "a shared expert with biases"),
    ],
)
def test_numbers_of_experts_that_do_not_go_together_are_refused(spec, fault):
    """Whatever family's config.json has them."""
    with pytest.raises(UnsupportedError, match=fault):
        spec()
