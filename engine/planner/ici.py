"""Lower bound on the time of a step's collectives, over the links between neighbours (ICI)."""

from caching.tpu.tpu_chip import Chip
from engine.planner.hlo_traffic import Collective

HOP_SECONDS = 1e-6
"""Latency of one hop ("How to Scale Your Model", jax-ml.github.io/scaling-book)."""

ROUNDS = {"all-reduce": 2}
"""A sum is a reduce-scatter and an all-gather; the others take one round."""


def exchange_seconds(collective: Collective, chip: Chip, chips: int) -> float:
    """Time of one collective over ``chips`` chips, in a bidirectional ring.

    Every slice has such a ring. With links for several rings, large exchanges may be faster; those
    of a step are small and dominated by latency.
    """
    if collective.kind == "collective-permute":
        return HOP_SECONDS + collective.nbytes / chip.link_bandwidth
    rounds = ROUNDS.get(collective.kind, 1)
    sent = collective.nbytes * (chips - 1) / chips
    return rounds * (sent / (2 * chip.link_bandwidth) + HOP_SECONDS * (chips // 2))


def exchanges_seconds(collectives: list[Collective], chip: Chip, chips: int) -> float:
    """The sum over a program's collectives: within a layer each depends on the last one."""
    return sum(one.times * exchange_seconds(one, chip, chips) for one in collectives)
