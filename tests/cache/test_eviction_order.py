"""Invariant 9: LRU is a reference LRU, block for block, and never beats the clairvoyant."""

import random
from array import array
from collections import OrderedDict

import pytest

from model.seeds import fuzz_seeds
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.core.events import BlockRemoved, CacheEvent

B = 16
Prompt = tuple[int, ...]


def make_prompts(choose: random.Random, count: int) -> list[Prompt]:
    """Block-aligned conversations that branch; one letter a block."""
    known: list[Prompt] = [()]
    for _ in range(count):
        stem = choose.choice(known[-12:])
        stem = stem[: choose.randrange(len(stem) + 1)] if choose.random() < 0.3 else stem
        grown = stem + tuple(choose.randrange(1000) for _ in range(choose.randrange(1, 4)))
        known.append(grown if len(grown) < 12 else grown[:1])
    return known[1:]


def replay_real(prompts: list[Prompt], capacity: int) -> tuple[list[int], int]:
    """Hit blocks of each prompt; number of evicted blocks."""
    removed: list[CacheEvent] = []
    config = CacheConfig((LayerGroup("full", (0,)),), (capacity + 1,))
    cache = CacheManager(config, on_event=removed.append)
    root, hits = cache.namespace(), []
    for prompt in prompts:
        tokens = array("I", [letter for letter in prompt for _ in range(B)])
        asked = tokens + array("I", [0])  # one more, so that all blocks may be found
        table = cache.open(cache.peek_match(asked, root), root)
        hits.append(cache.num_tokens_cached(table) // B)
        assert cache.extend(table, len(tokens)) == ()
        cache.commit(table, tokens, len(tokens))
        cache.release(table)
    return hits, sum(isinstance(event, BlockRemoved) for event in removed)


def replay_reference(prompts: list[Prompt], capacity: int) -> list[int]:
    """Oldest first; a prompt refreshes its blocks from the tail to the head."""
    order: OrderedDict[Prompt, None] = OrderedDict()
    hits = []
    for prompt in prompts:
        keys = [prompt[: j + 1] for j in range(len(prompt))]
        found = next((j for j, key in enumerate(keys) if key not in order), len(keys))
        hits.append(found)
        for key in keys:
            order.pop(key, None)
        while len(order) + len(keys) > capacity:
            order.popitem(last=False)
        order.update(dict.fromkeys(reversed(keys)))
    return hits


def clairvoyant_hits(prompts: list[Prompt], capacity: int) -> int:
    """Belady's MIN on single blocks, free to keep what it just read or not: an upper bound."""
    stream = [prompt[: j + 1] for prompt in prompts for j in range(len(prompt))]
    next_use, later = [0] * len(stream), {}
    for i in range(len(stream) - 1, -1, -1):
        next_use[i] = later.get(stream[i], len(stream))
        later[stream[i]] = i
    kept: dict[Prompt, int] = {}
    hits = 0
    for i, key in enumerate(stream):
        hits += key in kept
        kept[key] = next_use[i]
        if len(kept) > capacity:
            del kept[max(kept, key=lambda other: kept[other])]
    return hits


@pytest.mark.parametrize("seed", fuzz_seeds(6))
def test_invariant_9(seed: int) -> None:
    prompts = make_prompts(random.Random(seed), 300)
    num_blocks = sum(map(len, prompts))
    for capacity in (12, 25, 60, 10_000):
        hits, num_evicted = replay_real(prompts, capacity)
        assert hits == replay_reference(prompts, capacity)
        assert sum(hits) <= clairvoyant_hits(prompts, capacity) < num_blocks
        assert (num_evicted > 0) == (capacity < 10_000)
