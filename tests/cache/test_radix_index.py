"""Reuse at the exact token: stories with exact outcomes, and brute force over random prompts."""

import random
from array import array

import pytest

from model.seeds import fuzz_seeds
from model.small_cache import FULL, B, blocks, cached, make, run, start, tokens
from pagemill import CacheManager
from pagemill.cache.testing import evictable_blocks
from pagemill.core.events import BlockRemoved, BlockStored, CacheEvent


def radix(num_blocks: int = 20, **options: object) -> CacheManager:
    return make(num_blocks, prefix_index="radix", **options)  # type: ignore[arg-type]


def test_a_partly_equal_block_is_copied_and_never_written() -> None:
    cache = radix()
    old = tokens(48)
    cache.release(run(cache, old))
    new = old[:41] + tokens(30, 500)
    assert cached(cache, new) == 41
    table = start(cache, new)
    assert blocks(cache, table) == [4, 5, 6]
    copies = cache.extend(table, len(new))
    assert copies is not None and [(c.source, c.target) for c in copies] == [(6, 7)]
    assert blocks(cache, table) == [4, 5, 7, 8, 9]
    cache.release_copies(copies)
    cache.commit(table, new, len(new))
    cache.release(table)
    assert cached(cache, old) == 47 and cached(cache, new) == 70
    cache.check_integrity()


@pytest.mark.parametrize("length", (0, 1, 2, 15, 16, 17, 31, 32, 33, 50))
def test_short_prompts(length: int) -> None:
    """One token is left to compute, also of a prompt that is cached to its end."""
    cache = radix()
    cache.release(run(cache, tokens(50)))
    assert cached(cache, tokens(length)) == max(0, length - 1)


def test_the_rest_of_a_sequence_stays_as_a_tail_without_a_key() -> None:
    events: list[CacheEvent] = []
    cache = radix(on_event=events.append)
    cache.release(run(cache, tokens(21)))
    assert len(events) == 1 and isinstance(events[0], BlockStored)
    assert evictable_blocks(cache, FULL) == (5, 4)  # the tail goes first
    assert cached(cache, tokens(40)) == 21
    assert cache.stats().groups[0].num_published == 1
    assert cache.evict(1, FULL) == 1 and len(events) == 1  # nobody was told of the tail
    assert cached(cache, tokens(40)) == 16
    assert cache.evict(1, FULL) == 1 and isinstance(events[1], BlockRemoved)


def test_a_longer_run_displaces_the_tail() -> None:
    cache = radix()
    for length in (5, 9, 14, 16):
        cache.release(run(cache, tokens(length)))
        assert cache.stats().groups[0].num_evictable == 1  # one block, ever longer
    cache.release(run(cache, tokens(4)))  # covered by what is there: not kept
    assert cache.stats().groups[0].num_evictable == 1
    cache.check_integrity()


def test_split_inside_a_block_then_evict_the_child() -> None:
    """Two prompts part inside a block; when one half goes the other is whole."""
    cache = radix()
    first, second = tokens(64), tokens(37) + tokens(27, 900)
    cache.release(run(cache, first))
    table = run(cache, second)
    assert cache.stats().groups[0].num_copies == 1
    assert cache.evict(2, FULL) == 2  # the end of the first, which nobody holds
    assert cached(cache, first) == 37 and cached(cache, second + tokens(1)) == 64
    cache.check_integrity()
    cache.release(table)
    assert cache.evict(2, FULL) == 2
    assert cached(cache, second) == 32
    cache.check_integrity()


def test_a_match_stays_inside_one_salt() -> None:
    cache = radix()
    cache.release(run(cache, tokens(21)))
    assert cache.peek_match(tokens(21), cache.namespace(salt="other")).num_tokens == 0


def test_a_pool_without_room_for_a_copy_takes_whole_blocks() -> None:
    cache = radix(4)
    cache.release(run(cache, tokens(46)))
    prompt = tokens(40) + tokens(8, 700)
    root = cache.namespace()
    match = cache.peek_match(prompt, root)
    assert match.num_tokens == 40 and not cache.can_admit(match, 48)
    floored = cache.floor_match(match)
    assert floored.num_tokens == 32 and cache.can_admit(floored, 48)
    table = cache.open(floored, root)
    assert cache.extend(table, 48) == () and len(blocks(cache, table)) == 3


def test_a_pool_with_windows_matches_whole_blocks() -> None:
    cache = make(20, None, 24, prefix_index="radix")
    cache.release(run(cache, tokens(60)))
    assert cached(cache, tokens(60)) == 48


def test_memory_after_splits() -> None:
    """10,000 inserts that split long runs; when all is evicted the index is as small as before."""
    cache = radix(3000)
    before = cache._core.num_bytes(0)
    rng = random.Random(1)
    stem = array("I", [rng.randrange(100) for _ in range(2000)])
    cache.release(run(cache, stem))
    for i in range(10_000):
        prompt = stem[: rng.randrange(1, 2000)] + array("I", [1000 + i] * 17)
        cache.release(run(cache, prompt))
    assert cache._core.num_bytes(0)[1] > before[1]
    cache.check_integrity()
    assert cache.evict(3000, FULL) > 2000
    assert cache._core.num_bytes(0) == before


def prompts(rng: random.Random) -> list[array]:
    known = [array("I")]
    for _ in range(60):
        stem = rng.choice(known[-10:])
        cut = rng.choice((len(stem), rng.randrange(len(stem) + 1)))
        count = rng.choice((1, 3, 16, 17, 40))
        known.append(stem[:cut] + array("I", [rng.randrange(3) for _ in range(count)]))
    return known[1:]


@pytest.mark.parametrize("seed", fuzz_seeds(20))
def test_exact_matches_are_brute_force_and_aligned_ones_those_of_the_flat_index(seed: int) -> None:
    rng = random.Random(seed)
    flat, exact = make(4000), radix(4000)
    seen: list[array] = []
    num_partial = 0
    for prompt in prompts(rng):
        longest = 0
        for other in seen:
            pairs = zip(prompt[:-1], other, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            longest = max(longest, min(len(prompt) - 1, len(other)) if same is None else same)
        aligned = cached(flat, prompt)
        assert cached(exact, prompt) == longest
        assert aligned == longest // B * B
        num_partial += longest != aligned
        for cache in (flat, exact):
            cache.release(run(cache, prompt))
        seen.append(prompt)
    assert num_partial > 10
    exact.check_integrity()
