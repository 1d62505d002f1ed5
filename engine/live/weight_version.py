"""The account of which weights an engine serves."""

FIRST_VERSION = 1
"""Of the weights of the start."""


class WeightVersion:
    """Which weights an engine serves. The execution thread writes it."""

    def __init__(self) -> None:
        self.number = FIRST_VERSION
        """Each update or new load is one more."""
        self.name = ""
        """The operator's."""
        self.are_there = True

    def replace(self, name: str) -> None:
        """Others are served from now on."""
        self.number += 1
        self.name, self.are_there = name, True

    def drop(self) -> None:
        """None are on the devices."""
        self.are_there = False
