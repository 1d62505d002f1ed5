"""The shares of the service that an operator gives to clients."""

import math


def weights_by_client(given: str) -> dict[str, float] | None:
    """The weights in ``NAME=W,...``; None if they are invalid."""
    try:
        return dict(_parse(one.strip()) for one in given.split(",") if one.strip())
    except ValueError:
        return None


def _parse(given: str) -> tuple[str, float]:
    client, equals, weight = given.rpartition("=")
    if not (equals and client and 0 < float(weight) < math.inf):
        raise ValueError(given)
    return client, float(weight)
