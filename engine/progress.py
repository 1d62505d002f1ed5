"""The progress of a long start-up."""

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """``done`` of ``total`` units of a stage ("loading weights", bytes; "compiling", steps)."""

    stage: str
    done: int
    total: int
    unit: str
