"""What all processes of an engine find out together. Every process must call each of these, in the same order."""

import zlib
from collections.abc import Mapping

import jax
import numpy as np

from engine.errors import ConfigurationError


def least_of_all(number: int) -> int:
    """The minimum of a number over all processes."""
    if jax.process_count() == 1:
        return number
    return min(high << 30 | low for high, low in _gather((number >> 30, number & (1 << 30) - 1)))


def check_facts_alike(facts: Mapping[str, str]) -> None:
    """Raises ConfigurationError if ``facts``, values by name, differ between processes."""
    if jax.process_count() == 1:
        return
    [[first], *others] = _gather([_sum(repr(list(facts)))])  # of other names there may be more or fewer
    for process_id, [names] in enumerate(others, start=1):
        if names != first:
            raise ConfigurationError(
                f"process {process_id} has other settings than process 0: install the same version of oDriver on all hosts"
            )
    sums = _gather([_sum(fact) for fact in facts.values()])
    for process_id, theirs in enumerate(sums):
        differing = [name for name, mine, other in zip(facts, sums[0], theirs, strict=True) if mine != other]
        if differing:
            raise ConfigurationError(
                f"process {process_id} differs from process 0 in {', '.join(differing)}: start all with the same"
            )


def broadcast(numbers: tuple[int, ...]) -> list[int]:
    """Process 0's numbers, each below 2^31."""
    return _gather(numbers)[0]


def _sum(fact: str) -> int:
    return zlib.crc32(fact.encode()) >> 1


def _gather(numbers: "tuple[int, ...] | list[int]") -> list[list[int]]:
    """Every process's numbers, each below 2^31, by process id."""
    from jax.experimental.multihost_utils import process_allgather

    gathered = np.asarray(process_allgather(np.array(numbers, np.int32)))
    return [list(map(int, row)) for row in gathered.reshape(jax.process_count(), -1)]
