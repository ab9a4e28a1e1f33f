"""Tables, slots and accounts: stories with exact outcomes; the fuzz tests do the rest."""

import random
import sys

import numpy as np
import pytest

from model.small_cache import FULL, B, blocks, cached, make, run, start, tokens
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.core.events import CacheCleared, CacheEvent
from pagemill.core.types import GroupId


def test_hits_leave_the_free_list() -> None:
    """The blocks needed are exactly the free ones, but two of those are the hit: not now."""
    cache = make(5)
    cache.release(run(cache, tokens(32)))  # 2 evictable, 2 empty
    prompt = tokens(32) + tokens(48, 700)
    match = cache.peek_match(prompt, cache.namespace())
    assert match.num_tokens == 32
    assert cache.can_admit(match, 64) and not cache.can_admit(match, 65)
    assert not cache.can_admit(match, 64, reserve_blocks=1)
    assert cache.can_admit(match, 48, reserve_blocks=1)
    table = cache.open(match, cache.namespace())
    assert cache.extend(table, 65) is None
    assert cache.extend(table, 64) == ()
    assert cached(cache, tokens(33)) == 32


def test_double_release() -> None:
    cache = make()
    first = run(cache, tokens(40))
    second = cache.fork(first)
    cache.release(first)
    before = cache.stats()
    for call in (cache.release, cache.fork, cache.num_tokens_cached):
        with pytest.raises(AssertionError, match="not open"):
            call(first)
    assert cache.stats() == before
    cache.check_integrity()
    cache.release(second)
    third = start(cache, tokens(40))
    assert third not in (first, second)  # an old id never means a new table
    with pytest.raises(AssertionError, match="not open"):
        cache.extend(first, 50)


def test_copies_are_given_back_once() -> None:
    cache = make()
    first = run(cache, tokens(20))
    second = cache.fork(first)
    copies = cache.extend(second, 21)
    assert copies is not None and len(copies) == 1
    assert copies[0].source == blocks(cache, first)[1] != copies[0].target
    cache.release(first)
    cache.release(second)
    # invariant 2: the copy still reads its source, and what it is made for waits for it
    assert cache.stats().groups[0].num_held == 3 and cache.stats().num_open_tables == 0
    cache.check_integrity()
    assert not cache.reset()
    cache.release_copies(copies)
    assert cache.stats().groups[0].num_held == 0
    with pytest.raises(AssertionError, match="not being copied"):
        cache.release_copies(copies)
    cache.check_integrity()


def test_a_fork_shares_what_is_computed_and_nothing_else() -> None:
    cache = make()
    first = run(cache, tokens(40))
    assert cache.extend(first, 70) == ()
    second = cache.fork(first)
    assert blocks(cache, second) == blocks(cache, first)[:3]
    (copy,) = cache.extend(first, 70) or ()  # its next token goes into the shared block
    assert copy.source == blocks(cache, second)[2]
    (other,) = cache.extend(second, 41) or ()  # invariant 4: the first copy still reads it
    assert other.source == copy.source and other.target != copy.target
    cache.release_copies((copy, other))
    assert cache.stats().groups[0].num_held == 2 + 2 + 2  # shared, copied, slots ahead
    cache.check_integrity()


def test_the_last_holder_writes_in_place() -> None:
    cache = make()
    first = run(cache, tokens(40))
    second = cache.fork(first)
    cache.release_copies(cache.extend(first, 41) or ())
    assert cache.extend(second, 41) == ()
    assert blocks(cache, second)[2] != blocks(cache, first)[2]


def test_a_block_seen_as_partly_filled_by_others_is_published_later() -> None:
    """A fork made between extend and commit; invariant 4 for what the fork will write."""
    cache = make()
    first = run(cache, tokens(40))
    assert cache.extend(first, 48) == ()
    second = cache.fork(first)
    cache.commit(first, tokens(48), 48)
    assert cached(cache, tokens(49)) == 32
    cache.check_integrity()
    copies = cache.extend(second, 41)
    assert copies is not None and len(copies) == 1
    cache.release_copies(copies)
    assert cache.extend(first, 64) == ()
    cache.commit(first, tokens(64), 64)
    assert cached(cache, tokens(65)) == 64
    cache.check_integrity()


def test_shared_counted_once() -> None:
    """256 requests with one prefix, 64 at once, finished in random order."""
    choose = random.Random(5)
    cache = make(400)
    prefix, running, pool = tokens(160), [], 399
    for i in range(256):
        if len(running) == 64:
            cache.release(running.pop(choose.randrange(64)))
        running.append(run(cache, prefix + tokens(20, 1000 + 100 * i)))
        group = cache.stats().groups[0]
        assert group.num_empty + group.num_evictable + group.num_held == pool
        assert group.num_held == 10 + 2 * len(running)
    cache.check_integrity()
    for table in running:
        cache.release(table)
    assert cache.stats().groups[0].num_held == 0
    assert cache.stats().num_hit_tokens == 255 * 160


def test_transactional_allocation() -> None:
    """The third group is full: nothing happens in the first two."""
    groups = tuple(LayerGroup(f"g{i}", (i,)) for i in range(3))
    cache = CacheManager(CacheConfig(groups, (20, 20, 4)))
    cache.release(run(cache, tokens(48)))
    before = cache.stats()
    table = start(cache, tokens(80, 500))
    assert cache.extend(table, 80) is None
    assert cache.stats().groups == before.groups and cached(cache, tokens(49)) == 48
    assert cache.extend(table, 48) == ()
    cache.check_integrity()


def test_a_sequence_alone_can_fill_the_pool_whatever_is_cached() -> None:
    cache = make(9)
    cache.release(run(cache, tokens(128)))
    table = cache.open(cache.peek_match(tokens(0), cache.namespace()), cache.namespace())
    for end in range(16, cache.max_tokens() + 1, 16):  # recomputes what is cached, and holds it all
        assert cache.extend(table, end) == ()
        cache.commit(table, tokens(128), end)
        cache.check_integrity()
    assert cache.extend(table, 129) is None


def test_a_window_gives_back_what_left_it() -> None:
    cache = make(20, None, 24)
    table = run(cache, tokens(64))
    assert 0 not in blocks(cache, table, 0)
    assert [block == 0 for block in blocks(cache, table, 1)] == [True, True, False, False]
    assert cache.num_blocks(table, GroupId(1)) == 4
    assert cache.stats().groups[1].num_held == 2
    cache.release(table)
    assert cached(cache, tokens(65)) == 64
    assert cache.evict(1, GroupId(1)) == 1  # block 0: nothing that is in a window of 64 or 48
    assert cached(cache, tokens(65)) == 64 and cached(cache, tokens(49)) == 48
    assert cached(cache, tokens(33)) == 0  # [9, 32) needs it
    match = cache.peek_match(tokens(65), cache.namespace())
    assert match.block_ids(GroupId(1))[:2] == (0, 0) and 0 not in match.block_ids(FULL)


def test_a_window_is_admitted_by_what_it_holds_at_a_time() -> None:
    cache = make(7, 33)  # 6 blocks
    match = cache.peek_match(tokens(0), cache.namespace())
    assert not cache.can_admit(match, 400)
    assert cache.can_admit(match, 400, chunk_tokens=32)  # ceil((32 + 32) / 16) + 1 = 5
    assert not cache.can_admit(match, 400, chunk_tokens=64)
    assert cache.max_tokens() == 96 and cache.max_tokens(chunk_tokens=32) == sys.maxsize
    table = cache.open(match, cache.namespace())
    for end in range(32, 401, 32):
        assert cache.extend(table, end) == ()
        cache.commit(table, tokens(400), end)
    cache.check_integrity()


def test_max_tokens_is_that_of_the_smallest_group() -> None:
    groups = (LayerGroup("a", (0,)), LayerGroup("b", (1,), 64), LayerGroup("c", (2,)))
    cache = CacheManager(CacheConfig(groups, (100, 8, 50)))
    assert cache.max_tokens() == 7 * B
    assert cache.max_tokens(chunk_tokens=16) == 49 * B  # ceil(79 / 16) + 1 = 6 of 7
    assert cache.max_tokens(chunk_tokens=64) == 7 * B


def test_index_off() -> None:
    events: list[CacheEvent] = []
    cache = make(prefix_index="off", on_event=events.append)
    table = run(cache, tokens(64))
    assert cached(cache, tokens(65)) == 0
    fork = cache.fork(table)
    cache.check_integrity()
    cache.release(table)
    cache.release(fork)
    group = cache.stats().groups[0]
    assert group.num_empty == group.num_blocks - 1 and not events


def test_counters_nest() -> None:
    cache = make(9)
    cache.release(run(cache, tokens(40)))
    table = run(cache, tokens(64))
    cache.release(table)
    root = cache.namespace()
    cache.release(cache.open(cache.peek_match(tokens(64), root), root, is_resumed=True))
    run(cache, tokens(100, 900))
    stats, group = cache.stats(), cache.stats().groups[0]
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (3, 204, 32)
    assert (stats.num_resumes, stats.num_resumed_tokens) == (1, 48)  # invariant 10: not a hit
    assert stats.hit_rate == 32 / 204
    assert group.num_stored - group.num_evicted == group.num_published
    assert group.num_evicted == 3 and stats.num_open_tables == 1
    assert cache.usage() == group.num_held / 8 == 7 / 8


def test_reset() -> None:
    events: list[CacheEvent] = []
    cache = make(on_event=events.append)
    table = run(cache, tokens(64))
    assert not cache.reset() and cached(cache, tokens(65)) == 64
    cache.release(table)
    assert cache.reset() and cached(cache, tokens(65)) == 0
    assert events[4:] == [CacheCleared()]
    assert cache.stats().groups[0].num_empty == 19
    cache.check_integrity()


def test_tables_that_grow_in_turn_keep_to_their_runs() -> None:
    """Each opens an aligned run of four and stays in it while whole runs are left."""
    cache = make(68)  # 16 whole runs, and the blocks 1, 2, 3
    tables = [start(cache, tokens(0)) for _ in range(8)]
    for end in range(16, 129, 16):
        for table in tables:
            assert cache.extend(table, end) == ()
    for table in tables:
        first, second = blocks(cache, table)[::4]
        assert first % 4 == second % 4 == 0
        expected = [*range(first, first + 4), *range(second, second + 4)]
        assert blocks(cache, table) == expected
    assert cache.stats().groups[0].num_empty == 3


def test_block_tables_lie_side_by_side() -> None:
    cache = make(40, None, 24)
    tables = [run(cache, tokens(count, 1000 * count)) for count in (40, 1, 64)]
    empty = start(cache, tokens(0))
    for group, packed in enumerate(cache.block_tables([*tables, empty, tables[0]])):
        assert packed.block_ids.dtype == packed.indptr.dtype == np.int32
        assert list(packed.indptr) == [0, 3, 4, 8, 8, 11]
        assert list(packed.block_ids[4:8]) == blocks(cache, tables[2], group)
        assert list(packed.block_ids[8:]) == blocks(cache, tables[0], group)
    assert [list(packed.indptr) for packed in cache.block_tables([])] == [[0], [0]]
