"""What the search for cycles visits: not what a process keeps to its end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Exempt the objects that there are from the search for cycles: they stay.

    It would visit all of them, with no step meanwhile, whenever requests have made enough others.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def heap_frozen() -> Iterator[None]:
    """For imports: the search for cycles does not visit what they make, neither now nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
