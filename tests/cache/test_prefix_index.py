"""What is found, and what is not: stories with exact outcomes."""

import random
from array import array

import numpy as np
import pytest

from model.small_cache import FULL, B, blocks, cached, make, run, start, tokens
from pagemill.cache.testing import evictable_blocks, keep_hash_bytes, swap_cached_blocks
from pagemill.core.events import BlockRemoved, BlockStored, CacheEvent


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


def test_collisions_never_give_wrong_kv() -> None:
    """One byte of hash, few tokens: many lies, and every hit is still what was computed."""
    choose, cache, kv = random.Random(11), make(30), {}
    keep_hash_bytes(cache, 1)
    num_hits = 0
    for _ in range(600):
        letters = [choose.randrange(3) for _ in range(4)]
        prompt = array("I", [letter for letter in letters for _ in range(B)] + [7])
        table = start(cache, prompt)
        hit = cache.num_tokens_cached(table)
        assert cache.extend(table, len(prompt)) == ()
        for j, block in enumerate(blocks(cache, table)):
            content = tuple(prompt[: (j + 1) * B])
            assert j >= hit // B or kv[block] == content
            kv[block] = content
        cache.commit(table, prompt, len(prompt))
        cache.release(table)
        cache.check_integrity()
        num_hits += hit // B
    assert num_hits > 100 and cache.stats().num_hash_mismatches > 10
