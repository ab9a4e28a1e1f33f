"""Stories of the cache manager with exact outcomes; the fuzz tests do the rest."""

import random
import sys
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.cache.testing import evictable_blocks, keep_hash_bytes, swap_cached_blocks
from pagemill.core.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from pagemill.core.types import GroupId, TableId

B = 16
FULL = GroupId(0)


def make(
    num_blocks: int = 20,
    *windows: int | None,
    prefix_index: str = "flat",
    on_event: Callable[[CacheEvent], None] | None = None,
) -> CacheManager:
    groups = tuple(LayerGroup(f"g{i}", (i,), w) for i, w in enumerate(windows or (None,)))
    config = CacheConfig(groups, (num_blocks,) * len(groups), B, prefix_index)
    return CacheManager(config, on_event=on_event)


def tokens(count: int, first: int = 0) -> array:
    return array("I", range(first, first + count))


def start(cache: CacheManager, prompt: array) -> TableId:
    root = cache.namespace()
    return cache.open(cache.peek_match(prompt, root), root)


def run(cache: CacheManager, prompt: array) -> TableId:
    """Opens, computes everything, commits."""
    table = start(cache, prompt)
    assert cache.extend(table, len(prompt)) == ()
    cache.commit(table, prompt, len(prompt))
    return table


def cached(cache: CacheManager, prompt: array) -> int:
    return cache.peek_match(prompt, cache.namespace()).num_tokens


def blocks(cache: CacheManager, table: TableId, group: int = 0) -> list[int]:
    return [int(block) for block in cache.block_tables([table])[group].block_ids]


def test_a_prompt_misses_hits_and_is_evicted() -> None:
    events: list[CacheEvent] = []
    cache = make(6, on_event=events.append)
    prompt = tokens(40)
    first = run(cache, prompt)
    assert blocks(cache, first) == [1, 2, 3]
    assert cached(cache, prompt) == 32  # found while in use
    second = start(cache, prompt)
    assert cache.num_tokens_cached(second) == 32 and blocks(cache, second) == [1, 2]
    cache.release(first)
    cache.release(second)
    assert evictable_blocks(cache, FULL) == (2, 1)  # tail first
    assert cached(cache, prompt) == 32  # found after release
    other = run(cache, tokens(64, 1000))
    assert cached(cache, prompt) == 16  # one block had to go
    stored = [event.block_hash for event in events if isinstance(event, BlockStored)]
    removed = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert len(stored) == 2 + 4 and removed == [stored[1]]
    cache.release(other)
    cache.check_integrity()


@pytest.mark.parametrize("length", (0, 1, 15, 16, 17, 32))
def test_short_prompts(length: int) -> None:
    """At least one token is left to compute, also of a prompt that is cached to its end."""
    cache = make()
    cache.release(run(cache, tokens(64)))
    prompt = tokens(length)
    assert cached(cache, prompt) == max(0, length - 1) // B * B
    table = run(cache, prompt)
    cache.check_integrity()
    cache.release(table)
    assert cached(cache, tokens(65)) == 64


def test_verified_hits() -> None:
    """Two different blocks forced to one hash: no hit, and counted."""
    cache = make()
    keep_hash_bytes(cache, 0)
    cache.release(run(cache, tokens(16)))
    assert cached(cache, tokens(17)) == 16
    assert cached(cache, tokens(17, 500)) == 0
    assert cache.stats().num_hash_mismatches == 0  # peek changes nothing
    other = start(cache, tokens(17, 500))
    assert cache.stats().num_hash_mismatches == 1
    assert cache.extend(other, 40) == ()
    cache.commit(other, tokens(40, 500), 40)  # neither block can be published
    assert cache.stats().num_hash_mismatches == 2
    assert cache.stats().groups[0].num_published == 1
    cache.check_integrity()
    cache.release(other)
    assert cached(cache, tokens(17)) == 16


def test_a_hash_of_equal_tokens_but_another_parent_is_no_hit() -> None:
    """Equal second blocks behind different first ones, all hashes equal."""
    cache = make()
    keep_hash_bytes(cache, 1)
    for first in range(0, 4000, 100):
        cache.release(run(cache, tokens(16, first) + tokens(16, 9000)))
        cache.check_integrity()
    assert cache.stats().num_hash_mismatches > 0
    for first in range(0, 4000, 100):
        found = cache.peek_match(tokens(16, first) + tokens(17, 9000), cache.namespace())
        assert found.num_tokens in (0, 16, 32)
        if found.num_tokens == 32:
            assert len(set(found.block_ids(FULL))) == 2


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
    assert cache.stats().groups[0].num_held == 1  # invariant 2: the copy still reads it
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


def test_invariant_7_a_match_never_leaves_its_namespace() -> None:
    cache = make()
    mine, yours = cache.namespace(salt="mine"), cache.namespace(salt="yours")
    prompt = tokens(64)
    table = cache.open(cache.peek_match(prompt, mine), mine)
    cache.extend(table, 64)
    cache.commit(table, prompt, 64)
    assert cache.peek_match(prompt, mine).num_tokens == 48
    match = cache.peek_match(prompt, yours)
    assert match.num_tokens == 0
    with pytest.raises(AssertionError, match="another namespace"):
        cache.open(match, mine)


def test_a_match_is_good_until_the_cache_changes() -> None:
    cache = make()
    match = cache.peek_match(tokens(40), cache.namespace())
    run(cache, tokens(40))
    with pytest.raises(AssertionError, match="has changed"):
        cache.open(match, cache.namespace())
    with pytest.raises(AssertionError, match="has changed"):
        cache.can_admit(match, 10)


def test_equal_sequences_at_once_publish_once() -> None:
    """Invariant 5 with duplicates: the hash stays findable, whoever ends first; no event tells."""
    for first_to_end in (0, 1):
        events: list[CacheEvent] = []
        cache = make(on_event=events.append)
        pair = [start(cache, tokens(40)), start(cache, tokens(40))]
        for table in pair:
            assert cache.extend(table, 40) == ()
            cache.commit(table, tokens(40), 40)
        group = cache.stats().groups[0]
        assert (group.num_published, group.num_held, group.num_duplicates) == (2, 6, 2)
        assert len(events) == 2
        cache.release(pair[first_to_end])
        cache.check_integrity()
        match = cache.peek_match(tokens(40), cache.namespace())
        assert list(match.block_ids(FULL)) == blocks(cache, pair[1 - first_to_end])[:2]
        assert cache.stats().groups[0].num_held == 3
        cache.release(pair[1 - first_to_end])
        assert cache.stats().groups[0].num_evictable == 2 and len(events) == 2


def test_a_recomputed_block_takes_over_its_cached_twin() -> None:
    """Invariant 3: what is cached below the twin stays reachable; the twin's place is free."""
    cache = make(9)
    cache.release(run(cache, tokens(64)))
    again = run(cache, tokens(32))  # finds 16: the last token must be computed
    assert cache.num_tokens_cached(again) == 16
    group = cache.stats().groups[0]
    assert (group.num_published, group.num_held, group.num_evictable) == (4, 2, 2)
    assert cached(cache, tokens(65)) == 64
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


def test_swapped_blocks_are_found_under_each_other() -> None:
    """The negative control of equality tests: index and order are whole, the contents are not."""
    cache = make()
    mine, yours = tokens(49), tokens(49, 300)
    first, second = run(cache, mine), run(cache, yours)
    a, b = blocks(cache, first)[1], blocks(cache, second)[1]
    cache.release(first)
    cache.release(second)
    swap_cached_blocks(cache, FULL, a, b)
    cache.check_integrity()
    assert cache.peek_match(mine, cache.namespace()).block_ids(FULL)[1] == b
    assert cache.peek_match(yours, cache.namespace()).block_ids(FULL)[1] == a
    table = start(cache, mine)
    with pytest.raises(AssertionError, match="not evictable"):
        swap_cached_blocks(cache, FULL, a, b)
    cache.release(table)
    assert cache.evict(6, FULL) == 6
    cache.check_integrity()


def test_token_buffers() -> None:
    cache = make()
    cache.release(run(cache, tokens(64)))
    root = cache.namespace()
    assert cache.peek_match(np.arange(65, dtype=np.uint32), root).num_tokens == 64
    assert cache.peek_match(memoryview(tokens(65)), root).num_tokens == 64
    for wrong in (np.arange(65), array("i", range(65)), array("Q", range(65)), bytes(65)):
        with pytest.raises(TypeError, match="u32"):
            cache.peek_match(wrong, root)
    with pytest.raises(TypeError, match="u32"):
        cache.peek_match(np.zeros((2, 2), np.uint32), root)
    with pytest.raises(TypeError, match="u32"):
        cache.peek_match(np.arange(130, dtype=np.uint32)[::2], root)
    with pytest.raises(AssertionError, match="32 bytes"):
        cache.peek_match(tokens(65), b"short")


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
