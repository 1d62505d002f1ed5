"""A TPU's tables have whole tiles of columns; rows and logits are those of the model's own columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint
from flax import nnx
from jax.sharding import PartitionSpec
from loading import load
from whole_rows import compute_logprobs

from engine.devices.mesh import COPY, TP, DeviceMesh
from engine.models.linear import look_up
from engine.models.weights.store import parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat, table_width

FLOAT32 = np.dtype(np.float32)
HIDDEN = VARIANTS["llama2"].config["hidden_size"]


def as_served(directory, layout, *, devices=1, quantized=False):
    """A checkpoint's decoder in float32, or 8 bits."""
    return load(directory, WeightFormat(FLOAT32, layout, activations=FLOAT32 if quantized else None), devices)


def operations(mesh, table, ids, hidden):
    """The rows of a table at these ids, and the logits of hidden states."""

    def both(table, ids, hidden):
        return look_up(table, ids, axis=mesh.axis), table.get_value().logits(hidden)

    specs = jax.tree.map(lambda leaf: PartitionSpec(TP), table)
    return jax.jit(mesh.on_each(both, (specs, COPY, COPY), (COPY, PartitionSpec(None, TP))))(table, ids, hidden)


def test_a_width_is_rounded_up_to_whole_tiles_on_a_tpu_alone():
    """Of whole tiles nothing changes."""
    widths = {hidden: table_width(hidden, Layout.MATRIX) for hidden in (1, 127, 128, 129, 2880, 4096)}

    assert widths == {1: 128, 127: 128, 128: 128, 129: 256, 2880: 2944, 4096: 4096}
    assert {table_width(2880, layout) for layout in (Layout.AXES, Layout.PANELS)} == {2880}


@pytest.mark.parametrize(
    "quantized", [pytest.param(False, id="float32", marks=pytest.mark.thorough), pytest.param(True, id="int8")]
)
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_padded_table_has_the_rows_and_logits_of_the_models_own(tmp_path, devices, quantized):
    """The columns behind are zeros, are counted among the bytes, and change neither a scale nor a logit."""
    directory = build_checkpoint(tmp_path, vocab_size=700)  # less than whole blocks of the sampler
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    ids, hidden = jnp.arange(700), jax.random.normal(jax.random.key(0), (5, HIDDEN))

    padded, plain = (
        as_served(directory, layout, devices=devices, quantized=quantized) for layout in (Layout.MATRIX, Layout.AXES)
    )

    for name in ("embedding", "lm_head"):
        table, own = getattr(padded, name), getattr(plain, name)
        weight, expected = table.get_value(), own.get_value()
        numbers = np.asarray(weight.values)
        assert numbers.shape[1] == 128
        np.testing.assert_array_equal(numbers[:, :HIDDEN], expected.values)
        assert not numbers[:, HIDDEN:].any()
        if quantized:
            np.testing.assert_array_equal(weight.scales, expected.scales)
        (rows, logits), (own_rows, own_logits) = (operations(mesh, each, ids, hidden) for each in (table, own))
        np.testing.assert_array_equal(rows, own_rows)
        np.testing.assert_allclose(logits, own_logits, atol=1e-5)
    arrays = jax.tree.leaves(nnx.state(padded))
    each = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    form = WeightFormat(FLOAT32, Layout.MATRIX, activations=FLOAT32 if quantized else None)
    assert each == parameter_bytes(padded.partition, form)


@pytest.mark.parametrize(
    ("variant", "changes", "quantized"),
    [
        ("qwen2", {"hidden_size": 136}, True),
        pytest.param("gemma4", {}, False, marks=pytest.mark.thorough),
        pytest.param("llama2", {"hidden_size": 128}, False, marks=pytest.mark.thorough),
        pytest.param("qwen2", {}, False, marks=pytest.mark.thorough),
    ],
)
def test_a_model_with_padded_tables_says_the_same(tmp_path, variant, changes, quantized):
    """With a tied embedding, a width beyond one tile, and a table of each layer's inputs."""
    directory = build_checkpoint(tmp_path, variant, **changes)
    prompts = [np.random.default_rng(seed).integers(4, 144, 30).tolist() for seed in range(2)]

    padded, plain = (as_served(directory, layout, quantized=quantized) for layout in (Layout.MATRIX, Layout.AXES))

    np.testing.assert_allclose(compute_logprobs(padded, prompts), compute_logprobs(plain, prompts), atol=1e-4)
