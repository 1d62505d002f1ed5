"""Modules declare parameters here: name, logical axes, sizes, and tensors in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.devices.mesh import TP
from engine.models.weights.forms import Dense, Experts, Weight
from engine.models.weights.parameters import Parameter, Role, TensorRule
from engine.models.weights.weight_format import Layout

Axes = Mapping[str, int]
"""Names and sizes, in order; the names are those of ``engine.models.weights.parameters.AXES``."""
STD = 0.02
"""Standard deviation of a kernel before training, as in GPT-2 (Radford et al. 2019)."""


class ParameterFactory:
    """Makes a model's parameters: random to train, or zeros without ``rngs``, for their shapes under
    ``nnx.eval_shape`` to load, where drawing would be most of the time.

    Each is an ``nnx.Param`` whose metadata ``declared`` is its Parameter.
    """

    def __init__(self, rngs: nnx.Rngs | None, devices: int, num_layers: int, rules: Mapping[str, TensorRule]) -> None:
        self._rngs = rngs
        self.axis = TP if devices > 1 else None
        """The mesh axis that products of ``last`` kernels are summed over; None on one device."""
        self.devices = devices
        self._num_layers = num_layers
        self._rules = rules
        self._unused = set(rules)

    def kernel(
        self,
        name: str,
        inputs: Axes,
        outputs: Axes,
        rule: TensorRule,
        *,
        kv_replicas: int = 1,
        last: bool = False,
        exact: bool = False,
    ) -> nnx.Param[Weight]:
        """A kernel [prod(inputs), *outputs]; ``last`` if it adds to the residual stream.

        An ``exact`` one stays float32, and is never quantised.
        """
        axes = (*inputs.items(), *outputs.items())
        rule = self._rule(name, rule)
        parameter = Parameter(name, Role.KERNEL, axes, rule, len(inputs), kv_replicas, exact=exact)
        return self._weight(parameter, self._std(last))

    def experts(self, name: str, axes: Axes, rule: TensorRule, *, whole: str, last: bool = False) -> nnx.Param[Experts]:
        """Kernels [experts, input, *outputs], of one input.

        ``whole`` is the axis that devices do not split: ``experts`` or ``ffn``.
        """
        every = tuple(axes.items())
        parameter = Parameter(name, Role.EXPERTS, every, self._rule(name, rule), inputs=1, whole=whole)
        return self._weight(parameter, self._std(last))

    def table(self, name: str, axes: Axes, rule: TensorRule, *, padding: int = 0) -> nnx.Param[Weight]:
        """A table [vocabulary, hidden], the last ``padding`` of its rows not in the checkpoint."""
        return self._weight(
            Parameter(name, Role.TABLE, tuple(axes.items()), self._rule(name, rule), padding=padding), STD
        )

    def bias(
        self,
        name: str,
        axes: Axes,
        rule: TensorRule,
        *,
        kv_replicas: int = 1,
        exact: bool = False,
        whole: str | None = None,
        padding: int = 0,
    ) -> nnx.Param[Array]:
        """Zeros [*axes]; an ``exact`` one stays float32, and devices do not split ``whole``.

        Of a vocabulary the last ``padding`` are not in the checkpoint.
        """
        rule, every = self._rule(name, rule), tuple(axes.items())
        parameter = Parameter(
            name, Role.VECTOR, every, rule, kv_replicas=kv_replicas, padding=padding, exact=exact, whole=whole
        )
        return nnx.Param(jnp.zeros(parameter.shape), declared=parameter)

    def array(self, name: str, axes: Axes, rule: TensorRule) -> nnx.Param[Array]:
        """An array [*axes] that is not quantised, for what ``linear`` does not compute."""
        parameter = Parameter(name, Role.VECTOR, tuple(axes.items()), self._rule(name, rule))
        return nnx.Param(self._numbers(parameter, STD), declared=parameter)

    def scale(self, name: str, axes: Axes, rule: TensorRule, *, kv_replicas: int = 1) -> nnx.Param[Array]:
        """Ones f32[*axes], which stay float32."""
        parameter = Parameter(
            name, Role.VECTOR, tuple(axes.items()), self._rule(name, rule), kv_replicas=kv_replicas, exact=True
        )
        return nnx.Param(jnp.ones(parameter.shape, jnp.float32), declared=parameter)

    def require_all_rules_used(self) -> None:
        """Raises ValueError if a family has a rule for a parameter that its decoder lacks."""
        if self._unused:
            raise ValueError(f"the family has tensor rules for {sorted(self._unused)}, which its decoder does not have")

    def _rule(self, name: str, rule: TensorRule) -> TensorRule:
        self._unused.discard(name)
        return self._rules.get(name, rule)

    def _std(self, last: bool) -> float:
        return STD / (2 * self._num_layers) ** 0.5 if last else STD

    def _weight(self, parameter: Parameter, std: float) -> nnx.Param[Any]:
        numbers = self._numbers(parameter, std)
        return nnx.Param(Dense(numbers, Layout.AXES, parameter.out(self.devices)), declared=parameter)

    def _numbers(self, parameter: Parameter, std: float) -> Array:
        if self._rngs is None:
            return jnp.zeros(parameter.shape)
        return std * jax.random.normal(self._rngs.params(), parameter.shape)


def declared(param: nnx.Variable[Any]) -> Parameter:
    """The declaration of a factory's parameter."""
    parameter: Parameter = param.get_metadata("declared")
    return parameter
