"""HBMPageManager: no page is lost, given twice or freed twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caching.page_manager import SINK_PAGE, HBMPageManager


def test_the_sink_is_never_handed_out():
    """All pages but page 0 can be owned."""
    manager = HBMPageManager(5)

    assert sorted(manager.alloc(4)) == [1, 2, 3, 4]
    assert SINK_PAGE not in range(1, 5)


def test_shortage_is_an_answer():
    """can_alloc says no where there are too few pages, and alloc(0) is legal even then."""
    manager = HBMPageManager(3)
    manager.alloc(2)

    assert not manager.can_alloc(1)
    assert manager.can_alloc(0) and manager.alloc(0) == []


def test_a_failed_alloc_changes_nothing():
    """Asking for more than there is, without can_alloc, fails and leaves the pool as it was."""
    manager = HBMPageManager(3)

    with pytest.raises(AssertionError, match="can_alloc first"):
        manager.alloc(3)

    manager.check_integrity([])
    assert manager.num_free == 2


def test_a_double_free_asserts():
    """A page that nobody owns cannot be freed."""
    manager = HBMPageManager(3)
    pages = manager.alloc(1)
    manager.free(pages)

    with pytest.raises(AssertionError, match="no owner"):
        manager.free(pages)


def test_a_free_page_cannot_be_shared():
    """Only an owned page can get another owner."""
    with pytest.raises(AssertionError, match="cannot be shared"):
        HBMPageManager(3).share([1])


def test_a_shared_page_returns_with_its_last_owner():
    """Two owners free a page one after the other; only then it is free."""
    manager = HBMPageManager(3)
    pages = manager.alloc(1)
    manager.share(pages)

    manager.free(pages)
    assert manager.num_free == 1
    manager.free(pages)

    assert manager.num_free == 2


def test_integrity_notices_a_lost_page():
    """A page that is counted as owned, but that no owner names, is found."""
    manager = HBMPageManager(3)
    manager.alloc(1)

    with pytest.raises(AssertionError, match="owners are"):
        manager.check_integrity([])


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(["alloc", "share", "free"]), st.integers(0, 5))))
def test_any_history_keeps_the_pool_whole(num_pages, history):
    """After any sequence of legal calls, free and owned make up the pool and owners are as a plain count has them."""
    manager, owned = HBMPageManager(num_pages), Counter()

    for action, number in history:
        if action == "alloc" and manager.can_alloc(number):
            pages = manager.alloc(number)
            assert not owned.keys() & set(pages)
            owned.update(pages)
        elif action != "alloc" and owned:
            page = sorted(owned)[number % len(owned)]
            (manager.share if action == "share" else manager.free)([page])
            owned[page] += 1 if action == "share" else -1
            owned += Counter()
        manager.check_integrity(owned.elements())

    assert manager.num_free + manager.num_owned == manager.num_total == num_pages - 1
