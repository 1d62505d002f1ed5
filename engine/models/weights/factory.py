"""Modules declare parameters here: name, logical axes, sizes, and tensors in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.mesh import TP
from engine.models.weights.forms import Dense, Layout, Weight
from engine.models.weights.parameters import Parameter, Role, TensorRule

Axes = Mapping[str, int]
"""Names and sizes, in order; the names are those of ``engine.models.weights.parameters.AXES``."""
STD = 0.02
"""Standard deviation of a kernel before training, as in GPT-2 (Radford et al. 2019)."""


class ParameterFactory:
    """Makes a model's parameters: random to train, or shapes under ``nnx.eval_shape`` to load.

    Each is an ``nnx.Param`` whose metadata ``declared`` is its Parameter.
    """

    def __init__(self, rngs: nnx.Rngs, devices: int, num_layers: int, rules: Mapping[str, TensorRule]) -> None:
        self._rngs = rngs
        self.axis = TP if devices > 1 else None
        """The mesh axis that products of ``last`` kernels are summed over; None on one device."""
        self._devices = devices
        self._num_layers = num_layers
        self._rules = rules
        self._unused = set(rules)

    def kernel(
        self, name: str, inputs: Axes, outputs: Axes, rule: TensorRule, *, kv_replicas: int = 1, last: bool = False
    ) -> nnx.Param[Weight]:
        """A kernel [prod(inputs), *outputs]; ``last`` if it adds to the residual stream."""
        axes = (*inputs.items(), *outputs.items())
        std = STD / (2 * self._num_layers) ** 0.5 if last else STD
        return self._weight(Parameter(name, Role.KERNEL, axes, self._rule(name, rule), len(inputs), kv_replicas), std)

    def table(self, name: str, axes: Axes, rule: TensorRule, *, padding: int = 0) -> nnx.Param[Weight]:
        """A table [vocabulary, hidden], the last ``padding`` of its rows not in the checkpoint."""
        return self._weight(
            Parameter(name, Role.TABLE, tuple(axes.items()), self._rule(name, rule), padding=padding), STD
        )

    def bias(self, name: str, axes: Axes, rule: TensorRule, *, kv_replicas: int = 1) -> nnx.Param[Array]:
        """Zeros [*axes]."""
        parameter = Parameter(name, Role.VECTOR, tuple(axes.items()), self._rule(name, rule), kv_replicas=kv_replicas)
        return nnx.Param(jnp.zeros(parameter.shape), declared=parameter)

    def scale(self, name: str, axes: Axes, rule: TensorRule) -> nnx.Param[Array]:
        """Ones f32[*axes], which stay float32."""
        parameter = Parameter(name, Role.VECTOR, tuple(axes.items()), self._rule(name, rule), exact=True)
        return nnx.Param(jnp.ones(parameter.shape, jnp.float32), declared=parameter)

    def require_all_rules_used(self) -> None:
        """Raises ValueError if a family has a rule for a parameter that its decoder lacks."""
        if self._unused:
            raise ValueError(f"the family has tensor rules for {sorted(self._unused)}, which its decoder does not have")

    def _rule(self, name: str, rule: TensorRule) -> TensorRule:
        self._unused.discard(name)
        return self._rules.get(name, rule)

    def _weight(self, parameter: Parameter, std: float) -> nnx.Param[Weight]:
        part = parameter.part(self._devices)
        out = part[:1] if parameter.role is Role.TABLE else part[1:]
        numbers = std * jax.random.normal(self._rngs.params(), parameter.shape)
        return nnx.Param(Dense(numbers, Layout.AXES, out), declared=parameter)


def declared(param: nnx.Variable[Any]) -> Parameter:
    """The declaration of a factory's parameter."""
    parameter: Parameter = param.get_metadata("declared")
    return parameter
