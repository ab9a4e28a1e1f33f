"""A policy in Python, handed to the manager, and what callers see of eviction."""

import random
from array import array
from dataclasses import dataclass, field

import pytest

from model.trace_cases import branching_case, real_hits
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill._native import CacheCore
from pagemill.core.errors import ConfigError
from pagemill.core.layers import EVICTIONS
from pagemill.core.types import BlockId, GroupId

B = 16


def config(num_blocks: int, *, eviction: str = "lru", prefix_index: str = "flat") -> CacheConfig:
    group = LayerGroup("full", (0,))
    return CacheConfig((group,), (num_blocks,), prefix_index=prefix_index, eviction=eviction)


@dataclass
class LeastRecentlyTouched:
    """LRU again: of a path the last block is touched first, so that the tail goes first."""

    last: dict[tuple[GroupId, BlockId], tuple[int, int]] = field(default_factory=dict)
    num_dropped: int = 0

    def touch(
        self, group: GroupId, block_id: BlockId, key: int, position: int, now_ns: int, is_new: bool
    ) -> None:
        assert ((group, block_id) not in self.last) == is_new
        self.last[group, block_id] = (now_ns, -position)

    def rank(self, group: GroupId, block_id: BlockId, now_ns: int) -> float:
        time_ns, minus_position = self.last[group, block_id]
        return time_ns + minus_position

    def drop(self, group: GroupId, block_id: BlockId) -> None:
        del self.last[group, block_id]
        self.num_dropped += 1


def serve(cache: CacheManager, tokens: list[int]) -> int:
    prompt = array("I", tokens)
    root = cache.namespace()
    table = cache.open(cache.peek_match(prompt, root), root)
    hits = cache.num_tokens_cached(table)
    copies = cache.extend(table, len(prompt))
    assert copies is not None
    cache.commit(table, prompt, len(prompt))
    cache.release_copies(copies)
    cache.release(table)
    return hits


def test_a_policy_of_your_own_is_asked_and_told() -> None:
    policy = LeastRecentlyTouched()
    mine = CacheManager(config(9), policy=policy)
    theirs = CacheManager(config(9))
    choose = random.Random(4)
    for i in range(200):
        tokens = (
            [choose.randrange(3)] * B + [choose.randrange(4)] * B * choose.randrange(1, 4) + [0]
        )
        for cache in (mine, theirs):
            cache.advance(1000 * i)
        assert serve(mine, tokens) == serve(theirs, tokens)
    assert policy.num_dropped == mine.stats().groups[0].num_evicted > 20
    mine.check_integrity()


def test_blocks_of_two_groups_are_told_apart() -> None:
    """Each group has a pool of its own, so their block ids are the same numbers."""
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 40))
    policy = LeastRecentlyTouched()
    cache = CacheManager(CacheConfig(groups, (9, 9), prefix_index="flat"), policy=policy)
    choose = random.Random(4)
    for i in range(200):
        cache.advance(1000 * i)
        serve(cache, [choose.randrange(3)] * B + [choose.randrange(4)] * B * 3 + [0])
        cache.check_integrity()
    assert {group for group, _ in policy.last} == {0, 1}
    assert policy.num_dropped == sum(group.num_evicted for group in cache.stats().groups) > 40


def test_it_ranks_tails_too() -> None:
    policy = LeastRecentlyTouched()
    cache = CacheManager(config(9, prefix_index="radix"), policy=policy)
    choose, hits = random.Random(4), 0
    for i in range(200):
        cache.advance(1000 * i)
        hits += serve(cache, [choose.randrange(3)] * choose.randrange(1, 90)) % B > 0
        cache.check_integrity()
    assert hits > 50 and policy.num_dropped > 20


def test_an_error_in_a_policy_reaches_the_caller() -> None:
    class Broken(LeastRecentlyTouched):
        def rank(self, group: GroupId, block_id: BlockId, now_ns: int) -> float:
            raise RuntimeError("no rank today")

    cache = CacheManager(config(9), policy=Broken())
    with pytest.raises(RuntimeError, match="no rank today"):
        serve(cache, [1] * 33)


def test_a_policy_comes_before_the_first_block() -> None:
    core = CacheCore([9], [0], 16, True, False, False)
    cache = CacheManager(config(9))
    serve(cache, [1] * 33)
    core.set_policy(LeastRecentlyTouched())
    with pytest.raises(AssertionError, match="published already"):
        cache._core.set_policy(LeastRecentlyTouched())


def test_a_replay_asks_it_too() -> None:
    trace = branching_case(random.Random(5), 200).trace()
    core = CacheCore([41], [0], 1, True, False, False)
    core.set_policy(LeastRecentlyTouched())
    hits = core.replay(trace.token_ids, trace.start, trace.times_ns, trace.has_tool_calls, True)
    assert core.check(2) is None
    assert 0 < hits.sum() and len(hits) == len(real_hits(trace, "lru", 40))


def test_choices_are_named() -> None:
    with pytest.raises(ConfigError, match="choose one of lru, lfu"):
        config(9, eviction="best")
    for name in EVICTIONS:
        serve(CacheManager(config(9, eviction=name)), [1] * 40)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_bands_lifetimes_and_pins_under_every_policy(eviction: str) -> None:
    cache = CacheManager(config(13, eviction=eviction))
    core = cache._core
    for letter in range(4):
        serve(cache, [letter] * 33)
    blocks = {
        letter: cache.peek_match(array("I", [letter] * 33), cache.namespace()).native.block_ids(0)
        for letter in range(4)
    }
    core.set_retention(0, blocks[0][1], 60, 0, 0)
    core.set_retention(0, blocks[1][1], 35, 10**9, 0)
    core.set_retention(0, blocks[2][1], 35, 0, 7)
    assert core.retention(0, blocks[0][0]) == (60, 0, 0)
    assert core.retention(0, blocks[2][0]) == (35, 0, 7)

    def cached() -> list[int]:
        root = cache.namespace()
        return [cache.peek_match(array("I", [n] * 33), root).num_tokens // B for n in range(4)]

    for want in ([2, 2, 2, 0], [0, 2, 2, 0], [0, 0, 2, 0], [0, 0, 0, 0]):
        assert core.evict(0, 2) == 2
        assert cached() == want
        cache.check_integrity()


def test_pins_stay_within_their_budget_and_never_keep_a_request_waiting() -> None:
    cache = CacheManager(config(10, eviction="arc"))
    core = cache._core
    core.set_pin_budget(0, 4)
    for letter in range(3):
        serve(cache, [letter] * 33)
        found = cache.peek_match(array("I", [letter] * 33), cache.namespace())
        core.set_retention(0, found.native.block_ids(0)[1], 35, 0, 1)
    assert core.num_dropped_pins(0) == 2
    table = cache.open(cache.peek_match(array("I"), cache.namespace()), cache.namespace())
    assert cache.extend(table, 9 * B) == ()  # all of the pool
    cache.release(table)
    cache.check_integrity()
