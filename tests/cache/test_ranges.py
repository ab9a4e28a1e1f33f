"""Calls on a path or a namespace: keep, forget, share."""

import pytest

from model.small_cache import FULL, B, blocks, cached, make, run, start, tokens
from pagemill import CacheManager
from pagemill.cache.testing import evictable_blocks
from pagemill.core.retention import Retention

INDEXES = ("radix", "flat")
S = 1_000_000_000


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
@pytest.mark.parametrize("index", INDEXES)
def test_a_prefix_is_forgotten_with_what_goes_on_from_it(
    index: str, windows: tuple[int | None, ...]
) -> None:
    cache = make(40, *windows, prefix_index=index)
    root = cache.namespace()
    one, other = tokens(32) + tokens(33, 500), tokens(32) + tokens(33, 900)
    for end in (one, other, one + tokens(40, 700)):
        cache.release(run(cache, end))
    assert cache.forget(tokens(32) + tokens(16, 500), root) >= 4
    cache.check_integrity()
    assert cached(cache, one) == 32 and cached(cache, other + tokens(1)) >= 64
    assert cache.forget(tokens(32) + tokens(4, 555), root) == 0  # unknown
    held = run(cache, tokens(65, 2000))
    assert cache.forget(tokens(65, 2000), root) == 0  # in use
    cache.release(held)
    assert cache.forget(tokens(20), root) > 0
    cache.check_integrity()
    assert cached(cache, other) in (0, 16)
    assert cache.forget(tokens(0), root) > 0
    assert cached(cache, tokens(65, 2000)) == 0
    cache.check_integrity()


def test_a_prompt_inside_a_block_is_forgotten_and_its_neighbour_stays() -> None:
    cache = make(20, prefix_index="radix")
    root = cache.namespace()
    mine, other = tokens(10) + tokens(30, 500), tokens(5) + tokens(30, 900)
    cache.release(run(cache, mine))
    cache.release(run(cache, other))
    assert cache.forget(tokens(10), root) == 3
    assert cached(cache, mine) == 5 and cached(cache, other + tokens(1)) == 35


@pytest.mark.parametrize("windows", [(None,), (None, 24), (24,)])
@pytest.mark.parametrize("index", INDEXES)
def test_a_namespace_is_forgotten(index: str, windows: tuple[int | None, ...]) -> None:
    cache = make(40, *windows, prefix_index=index)
    mine, others = cache.namespace(tenant="a"), cache.namespace(tenant="b")
    for root in (mine, others):
        for first in (0, 300):
            prompt = tokens(16) + tokens(40, first)
            table = cache.open(cache.peek_match(prompt, root), root)
            copies = cache.extend(table, len(prompt))
            assert copies is not None
            cache.release_copies(copies)
            cache.commit(table, prompt, len(prompt))
            cache.release(table)
    before = sum(group.num_evictable for group in cache.stats().groups)
    gone = cache.forget_namespace(mine)
    cache.check_integrity()
    assert cache.peek_match(tokens(16) + tokens(40, 300), mine).num_tokens == 0
    assert cache.peek_match(tokens(16) + tokens(40, 300), others).num_tokens >= 48
    assert gone == before // 2
    assert cache.forget_namespace(mine) == 0
    assert cache.forget_namespace(others) == gone
    assert all(group.num_empty == 39 for group in cache.stats().groups)


def test_shared_runs() -> None:
    """0 .. 2       2 .. 4        4 ..
    a b c        a b           a | b
                 c"""
    cache = make(40)
    stem = tokens(32)
    a = run(cache, stem + tokens(32, 100) + tokens(20, 200))
    cache.release(run(cache, stem + tokens(32, 100) + tokens(20, 200)))
    b = run(cache, stem + tokens(32, 100) + tokens(20, 300))
    c = run(cache, stem + tokens(40, 400))
    runs = cache.shared_runs([a, b, c], FULL)
    assert [(r.first, r.num_blocks, r.members) for r in runs] == [
        (0, 2, (0, 1, 2)),
        (2, 2, (0, 1)),
    ]
    assert blocks(cache, a)[:4] == blocks(cache, b)[:4]
    assert cache.shared_runs([a], FULL) == () == cache.shared_runs([], FULL)
    with pytest.raises(AssertionError, match="not open"):
        cache.shared_runs([a, 12345], FULL)  # type: ignore[list-item]


def keep(first: int, retention: Retention, cache: CacheManager) -> None:
    table = start(cache, tokens(32, first))
    cache.retain(table, retention, 1)
    copies = cache.extend(table, 32)
    assert copies is not None
    cache.release_copies(copies)
    cache.commit(table, tokens(32, first), 32)
    cache.release(table)


def test_bands_go_from_low_to_high() -> None:
    cache = make(20)
    for first, band in ((0, 50), (100, 35), (200, 10), (300, 35)):
        keep(first, Retention(band), cache)
    gone = []
    for _ in range(4):
        assert cache.evict(2, FULL) == 2
        gone.append([first for first in (0, 100, 200, 300) if not cached(cache, tokens(33, first))])
    assert gone == [[200], [100, 200], [100, 200, 300], [0, 100, 200, 300]]
    cache.check_integrity()


def test_a_lifetime_ends_and_starts_again_at_a_hit() -> None:
    cache = make(20)
    keep(0, Retention(ttl_ns=10 * S), cache)
    keep(100, Retention(), cache)
    cache.advance(8 * S)
    cache.release(run(cache, tokens(32)))  # found: the ten seconds start again
    cache.advance(15 * S)
    assert cache.evict(2, FULL) == 2 and cached(cache, tokens(33)) == 32
    keep(200, Retention(), cache)
    cache.advance(18 * S)  # over: the oldest now
    assert cache.evict(2, FULL) == 2 and cached(cache, tokens(33)) == 0
    assert cached(cache, tokens(33, 200)) == 32


def test_pins_go_last_and_have_a_budget() -> None:
    cache = make(10)  # four pinned blocks of nine
    for first in (0, 100, 200):
        keep(first, Retention(is_pinned=True), cache)
    keep(300, Retention(), cache)
    assert cache.evict(2, FULL) == 2
    assert cached(cache, tokens(33, 100)) == cached(cache, tokens(33, 200)) == 32
    big = run(cache, tokens(9 * B, 1000))  # nobody waits for a pin
    assert len(blocks(cache, big)) == 9
    cache.release(big)
    cache.check_integrity()


def test_a_parent_is_kept_as_well_as_its_children() -> None:
    cache = make(20)
    cache.release(run(cache, tokens(32)))
    table = run(cache, tokens(64))
    cache.retain(table, Retention(80), 1)
    cache.release(table)
    cache.release(run(cache, tokens(32, 700)))
    order = []
    while evictable_blocks(cache, FULL):
        before = cached(cache, tokens(65))
        assert cache.evict(1, FULL) == 1
        order.append(before - cached(cache, tokens(65)))
    assert order == [0, 0, 16, 16, 16, 16]


def test_a_duplicate_raises_what_it_stands_for() -> None:
    """Two tables compute the same tokens; the second one's retention counts for the block found."""
    cache = make(20)
    first, second = start(cache, tokens(32)), start(cache, tokens(32))
    cache.retain(second, Retention(90), 1)
    for table in (first, second):
        assert cache.extend(table, 32) == ()
        cache.commit(table, tokens(32), 32)
    cache.release(second)
    cache.release(first)
    cache.release(run(cache, tokens(32, 500)))
    assert cache.evict(2, FULL) == 2 and cached(cache, tokens(33)) == 32


def test_a_lifetime_that_ran_out_is_over() -> None:
    cache = make(20)
    keep(0, Retention(ttl_ns=1000 * S), cache)
    cache.advance(2000 * S)
    keep(0, Retention(ttl_ns=10 * S), cache)
    cache.advance(2015 * S)
    keep(100, Retention(), cache)
    assert cache.evict(2, FULL) == 2 and cached(cache, tokens(33)) == 0


def test_media_are_part_of_the_key_by_kind() -> None:
    cache = make()
    roots = {
        cache.namespace(),
        cache.namespace(media=("x",)),
        cache.namespace(media=("x", "y")),
        cache.namespace(media=("y", "x")),
        cache.namespace(adapter="x"),
        cache.namespace(salt="x"),
        cache.namespace(tenant="x"),
    }
    assert len(roots) == 7
