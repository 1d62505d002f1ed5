"""What a daemon is made of is not searched for cycles while it serves."""

import gc
import weakref

from ipc.service.start_up import freeze_heap


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
