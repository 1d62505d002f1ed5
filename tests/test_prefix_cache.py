"""Kept pages: found by what they hold, given away in the order in which they came back."""

from caching.page_manager import NOTHING_FOUND, HBMPageManager
from caching.prefix_cache import page_keys


def build_kept(pages: HBMPageManager, keys: list[bytes]) -> list[int]:
    """Pages that hold these keys, and nobody owns."""
    kept = pages.alloc(len(keys))
    for page, key in zip(kept, keys, strict=True):
        pages.keep(page, key)
    pages.free(reversed(kept))
    return kept


def test_a_key_stands_for_all_tokens_up_to_its_page() -> None:
    """Chains go on where they left off; another beginning, or another salt, has other keys all the way."""
    whole = page_keys(b"salt", range(12), 4)

    assert len(set(whole)) == 3 and page_keys(b"salt", range(15), 4) == whole
    assert page_keys(whole[0], range(4, 12), 4) == whole[1:]
    assert set(whole).isdisjoint(page_keys(b"", range(12), 4))
    assert set(whole).isdisjoint(page_keys(b"salt", [9, *range(1, 12)], 4))


def test_what_was_kept_is_found_as_far_as_it_goes() -> None:
    """The longest beginning; a hole ends it."""
    pages, keys = HBMPageManager(9), page_keys(b"", range(16), 4)
    kept = build_kept(pages, keys[:3])

    assert pages.find(keys) == kept and pages.num_cached == 3
    pages.forget(kept[1:2])
    assert pages.find(keys) == kept[:1] and pages.num_cached == 2
    pages.check_integrity([])


def test_a_cached_page_is_given_away_when_no_free_one_is_left() -> None:
    """The end of a chain first, the chain that came back longest ago before others; ages are counted."""
    pages, keys, others = HBMPageManager(7), page_keys(b"", range(8), 4), page_keys(b"x", range(8), 4)
    build_kept(pages, keys)
    pages.now = 2.0
    build_kept(pages, others)

    assert pages.can_alloc(6) and not pages.can_alloc(7)
    pages.now = 5.0
    owned = pages.alloc(3)

    assert (len(pages.find(keys)), len(pages.find(others))) == (1, 2)
    assert (pages.cache.evictions, pages.cache.lifetime_seconds, pages.cache.idle_seconds) == (1, 5.0, 5.0)
    pages.check_integrity(owned)


def test_a_shared_page_comes_back_when_its_last_owner_lets_go() -> None:
    """Cached, owned, owned twice, cached: and the most recently used of all."""
    pages, keys = HBMPageManager(4), page_keys(b"", range(4), 4)
    (page,) = build_kept(pages, keys)
    build_kept(pages, page_keys(b"x", range(4), 4))

    pages.share([page])
    pages.share([page])
    pages.check_integrity([page, page])
    pages.free([page])
    pages.free([page])
    pages.alloc(2)

    assert pages.find(keys) == [page]


def test_of_two_pages_with_the_same_contents_one_is_found() -> None:
    """The first; the other is free when its owner lets go."""
    pages, keys = HBMPageManager(4), page_keys(b"", range(4), 4)
    first, second = pages.alloc(2)
    pages.keep(first, keys[0])
    pages.keep(second, keys[0])

    pages.free([first, second])

    assert pages.find(keys) == [first] and (pages.num_cached, pages.num_free) == (1, 2)


def test_nothing_is_found_after_the_memory_was_lost() -> None:
    """Owned pages stay owned, cached ones are free."""
    pages, keys = HBMPageManager(6), page_keys(b"", range(8), 4)
    kept = build_kept(pages, keys)
    pages.share(kept[:1])

    pages.forget_all()

    assert pages.find(keys) == [] and pages.num_cached == 0
    pages.check_integrity(kept[:1])


def test_a_second_look_goes_on_from_the_first() -> None:
    """Pages of a chain that were given away, kept, taken or let go since are counted as a whole search would."""
    pages, keys = HBMPageManager(9), page_keys(b"", range(24), 4)
    kept = build_kept(pages, keys[:4])
    looks = [pages.recount(keys, 6, NOTHING_FOUND)]
    pages.share(kept[:3])
    looks.append(pages.recount(keys, 6, looks[-1]))
    pages.free(reversed(kept[1:3]))
    owned = pages.alloc(5)
    pages.keep(owned[0], keys[3])
    looks.append(pages.recount(keys, 6, looks[-1]))
    looks.append(pages.recount(keys, 1, looks[-1]))

    assert looks == [(4, 0), (4, 3), (4, 1), (1, 1)]
    assert pages.find(keys[:6]) == [*kept[:3], owned[0]]


def test_what_keys_stand_for_can_be_forgotten() -> None:
    """Whoever owns the pages, and those that hold nothing are left alone."""
    pages, keys = HBMPageManager(9), page_keys(b"", range(16), 4)
    kept = build_kept(pages, keys[:3])
    pages.share(kept[:1])

    pages.forget_keys(keys)

    assert pages.find(keys) == [] and pages.num_cached == 0
    pages.check_integrity(kept[:1])
