"""A kernel's product with adapters, whatever form its own numbers have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.devices.mesh import one_device
from engine.models.adapters.adapted import Adapted, AdapterRows, Apart, Masked, Parts
from engine.models.adapters.slot_words import num_words, slot_words
from engine.models.weights.forms import form_of
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.weight_format import Layout, WeightFormat

FLOAT32 = np.dtype(np.float32)
INPUTS, FFN, RANK, SLOTS = 64, 32, 3, 4
PARAMETER = Parameter(
    "mlp.gate_up_kernel", Role.KERNEL, (("hidden", INPUTS), ("gate_up", 2), ("ffn", FFN)), tensors("gate", "up"), inputs=1
)  # fmt: skip
FORMS = {
    "plain": WeightFormat(FLOAT32, Layout.MATRIX),
    "8 bits": WeightFormat(FLOAT32, Layout.MATRIX, activations=FLOAT32),
    "4 bits": WeightFormat(FLOAT32, Layout.MATRIX, activations=FLOAT32, bits=4),
    "panels": WeightFormat(FLOAT32, Layout.PANELS),
}


@pytest.fixture(params=FORMS)
def kernel(request):
    """A kernel of gate and up with random adapters in its slots, masked; in panels they are apart."""
    form, rng = FORMS[request.param], np.random.default_rng(0)
    kind = form_of(PARAMETER, form, 1)
    assert kind is not None
    values = jnp.asarray(rng.normal(size=(INPUTS, 2 * FFN)), FLOAT32)
    base = kind.made_of(values, PARAMETER, form, one_device())
    a = jnp.asarray(rng.normal(size=(2, SLOTS * RANK, INPUTS)), FLOAT32)
    b = tuple(jnp.asarray(rng.normal(size=(SLOTS * RANK, FFN)), FLOAT32) for _ in range(2))
    return Adapted(base, Masked(a, b, Parts(0, (1, 1))))


def product(kernel, x, slots):
    """Of the form that goes with the kernel's layout, whose factors are those of ``kernel``."""
    rows = AdapterRows(jnp.asarray(slots, jnp.int32), SLOTS)
    if kernel.base.layout is not Layout.PANELS:
        return jax.jit(Adapted.product)(kernel, x, rows)
    masked, words = kernel.factors, num_words(RANK, INPUTS, (FFN, FFN), FLOAT32)
    a = np.asarray(masked.a).reshape(2, SLOTS, RANK, INPUTS)
    b = [np.asarray(each).reshape(SLOTS, RANK, FFN) for each in masked.b]
    slot = [slot_words(a[:, slot], [each[slot] for each in b], words) for slot in range(SLOTS)]
    return jax.jit(Adapted.product)(Adapted(kernel.base, Apart(jnp.asarray(slot), masked.parts)), x, rows)


def test_each_row_gets_the_product_of_its_own_slot(kernel):
    """Rows of all slots, in no order, and of none."""
    slots = [2, -1, 0, 3, 1, 2]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(len(slots), INPUTS)), FLOAT32)

    found = product(kernel, x, slots)

    base, factors = np.asarray(jax.jit(type(kernel.base).product)(kernel.base, x)), kernel.factors
    for row, slot in enumerate(slots):
        own = slice(slot * RANK, (slot + 1) * RANK)
        deltas = [(factors.a[part, own] @ x[row]) @ factors.b[part][own] for part in range(2)] if slot >= 0 else [0, 0]
        wanted = base[row] + np.concatenate([np.broadcast_to(delta, FFN) for delta in deltas])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-3)


def test_a_row_without_an_adapter_is_the_models_to_the_bit(kernel):
    """Whoever is beside it."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, INPUTS)), FLOAT32)

    found = product(kernel, x, [-1, 1, -1])

    base = np.asarray(jax.jit(type(kernel.base).product)(kernel.base, x))
    np.testing.assert_array_equal(found[::2], base[::2])
    assert not np.array_equal(found[1], base[1])
