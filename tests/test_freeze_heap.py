"""What a daemon is made of is not searched for cycles while it serves."""

import gc
import signal
import weakref

import pytest

from ipc.process.heap import freeze_heap, heap_frozen
from ipc.process.signals import postponing_signals


class Kept:
    """An object that may refer to itself."""

    def __init__(self) -> None:
        self.itself: Kept | None = None


def test_what_is_kept_is_not_visited_again_and_garbage_goes_first() -> None:
    """A full collection finds none of the objects from before; a cycle that nothing held is gone."""
    kept, garbage = [Kept() for _ in range(10)], Kept()
    garbage.itself, gone = garbage, weakref.ref(garbage)
    del garbage

    freeze_heap()

    assert gone() is None
    visited = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in visited for one in kept)


def test_a_signal_in_an_import_is_handled_behind_it() -> None:
    """Its handler may raise."""

    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, stop)
    imported = []
    try:
        with pytest.raises(InterruptedError), postponing_signals():
            signal.raise_signal(signal.SIGTERM)
            imported.append("all of it")
        with pytest.raises(InterruptedError):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert imported == ["all of it"]


def test_imports_are_not_searched_for_cycles_and_what_comes_after_them_is() -> None:
    """Nothing is collected meanwhile, what they made is not visited later, and the search is on again even after an
    error."""
    with pytest.raises(ImportError), heap_frozen():
        assert not gc.isenabled()
        kept = Kept()
        raise ImportError

    assert gc.isenabled()
    assert all(one is not kept for one in gc.get_objects())
    garbage = Kept()
    garbage.itself, gone = garbage, weakref.ref(garbage)
    del garbage
    gc.collect()
    assert gone() is None
