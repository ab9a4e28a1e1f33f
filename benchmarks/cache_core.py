"""Speed and memory of the cache core: what the engine and a planner wait for.

build_ms, bytes_per_block      a pool of 1,000,000 blocks, without and with an index
alloc_mblocks_s                32,768-token tables given and taken back, million blocks/s
hash_ms                        the chain of block hashes of 32,768 tokens
match_us_*                     a cached prompt of 32,768 tokens: one node, 64 nodes, flat index
                               (hashes given, token ids compared)
evict_ns                       a block, LRU, whatever the number of leaves; worst of several
*_short                        the same with a leaf a block: prompts of one block each
step_us                        one decode step of 256 requests: slots, commit, block tables

python benchmarks/cache_core.py [--quick] [--json FILE]
"""

import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from common import finish, make_parser
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill._native import CacheCore, chain_hash
from pagemill.core.types import GroupId

B = 16
FULL = GroupId(0)
PROMPT_TOKENS = 32_768
POOL_BLOCKS = 1_000_000
STEP_REQUESTS = 256
KEYS = (
    "build_ms",
    "bytes_per_block",
    "index_bytes_per_block",
    "alloc_mblocks_s",
    "hash_ms",
    "match_us_radix1",
    "match_us_radix64",
    "match_us_flat",
    "evict_ns",
    "step_us",
    "index_bytes_per_block_short",
    "evict_ns_short",
)


def best_of(rounds: int, run: Callable[[], Any]) -> float:
    """Median seconds of ``rounds`` calls, after one to warm up."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make(num_blocks: int, index: str, eviction: str = "lru") -> CacheManager:
    groups = (LayerGroup("full", (0,)),)
    return CacheManager(CacheConfig(groups, (num_blocks,), B, index, eviction))


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32)


def fill(cache: CacheManager, prompt: np.ndarray) -> None:
    root = cache.namespace()
    table = cache.open(cache.peek_match(prompt, root), root)
    copies = cache.extend(table, len(prompt))
    assert copies is not None
    cache.release_copies(copies)
    cache.commit(table, prompt, len(prompt))
    cache.release(table)


def pool_figures(num_blocks: int) -> dict[str, float]:
    build_s = best_of(5, lambda: CacheCore([num_blocks], [0], B, False, False, False))
    bare = CacheCore([num_blocks], [0], B, False, False, False)
    full = make(num_blocks, "radix")
    for i in range(num_blocks // (PROMPT_TOKENS // B)):
        fill(full, tokens(PROMPT_TOKENS, i))
    assert full.stats().groups[0].num_published > 0.99 * num_blocks - 2048
    return {
        "build_ms": build_s * 1e3,
        "bytes_per_block": sum(bare.num_bytes(0)) / num_blocks,
        "index_bytes_per_block": sum(full._core.num_bytes(0)) / num_blocks,
    }


def allocate_figure() -> float:
    """Million blocks a second, given and taken back in tables of 2,048 blocks."""
    cache = make(50_000, "off")
    root, empty = cache.namespace(), array("I")
    count = 20

    def run() -> None:
        tables = [cache.open(cache.peek_match(empty, root), root) for _ in range(count)]
        for table in tables:
            assert cache.extend(table, PROMPT_TOKENS) is not None
        for table in tables:
            cache.release(table)

    return count * (PROMPT_TOKENS // B) / best_of(20, run) / 1e6


def match_figures() -> dict[str, float]:
    prompt = tokens(PROMPT_TOKENS, 1)
    asked = np.append(prompt, np.uint32(7))
    one, many, flat = make(6_000, "radix"), make(6_000, "radix"), make(6_000, "flat")
    for cache in (one, many, flat):
        fill(cache, prompt)
    for i in range(1, 64):  # 63 branches: the prompt is 64 runs
        cut = i * PROMPT_TOKENS // 64
        fill(many, np.append(prompt[:cut], tokens(3, 1000 + i) + np.uint32(60_000)))
    root = one.namespace()
    keys = chain_hash(root, prompt, B)
    calls = {
        "match_us_radix1": lambda: one.peek_match(asked, root),
        "match_us_radix64": lambda: many.peek_match(asked, root),
        "match_us_flat": lambda: flat.peek_match(asked, root, keys),
    }
    for call in calls.values():
        assert call().num_tokens == PROMPT_TOKENS
    figures = {name: best_of(200, call) * 1e6 for name, call in calls.items()}
    figures["hash_ms"] = best_of(50, lambda: chain_hash(root, prompt, B)) * 1e3
    return figures


def evict_figure(num_leaves: int, num_blocks: int, eviction: str = "lru") -> float:
    """Nanoseconds a block to evict everything, in a pool of so many leaves."""
    cache = make(num_blocks + 2, "radix", eviction)
    length = num_blocks // num_leaves * B
    for i in range(num_leaves):
        fill(cache, tokens(length, i))
    count = cache.stats().groups[0].num_evictable
    start = time.perf_counter()
    while cache.evict(1000, FULL):
        pass
    return (time.perf_counter() - start) / count * 1e9


def short_figures(num_blocks: int) -> dict[str, float]:
    """Bytes a block, its part of the pool included, and nanoseconds to evict one."""
    cache = make(num_blocks + 2, "radix")
    for i in range(num_blocks):
        fill(cache, tokens(B, i))
    num_bytes = sum(cache._core.num_bytes(0))
    count = cache.stats().groups[0].num_evictable
    assert count > 0.99 * num_blocks
    start = time.perf_counter()
    while cache.evict(1000, FULL):
        pass
    seconds = time.perf_counter() - start
    return {
        "index_bytes_per_block_short": num_bytes / count,
        "evict_ns_short": seconds / count * 1e9,
    }


def step_figure() -> float:
    cache = make(40_000, "radix")
    root = cache.namespace()
    prompts = [array("I", tokens(512, i).tolist()) for i in range(STEP_REQUESTS)]
    tables = [cache.open(cache.peek_match(prompt, root), root) for prompt in prompts]
    counts = [len(prompt) for prompt in prompts]
    assert cache.extend_all(tables, counts)[0] == STEP_REQUESTS
    cache.commit_all(tables, prompts, counts)
    times = []
    for _ in range(64):
        for i, prompt in enumerate(prompts):
            prompt.append(i)
            counts[i] += 1
        start = time.perf_counter()
        num_done, _ = cache.extend_all(tables, counts)
        cache.block_tables(tables)
        cache.commit_all(tables, prompts, counts)
        times.append(time.perf_counter() - start)
        assert num_done == STEP_REQUESTS
    return statistics.median(times) * 1e6


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    num_blocks = 200_000 if args.quick else POOL_BLOCKS
    leaves = (1, 1000, num_blocks // 10)
    figures: dict[str, Any] = {"num_blocks": num_blocks, **pool_figures(num_blocks)}
    figures["alloc_mblocks_s"] = allocate_figure()
    figures |= match_figures()
    for count in leaves:
        figures[f"evict_ns_{count}_leaves"] = evict_figure(count, num_blocks)
    figures["evict_ns"] = max(figures[f"evict_ns_{count}_leaves"] for count in leaves)
    figures["evict_ns_reuse_rank"] = evict_figure(1000, num_blocks // 5, "reuse_rank")
    figures["step_us"] = step_figure()
    figures |= short_figures(num_blocks // 2)
    for name, value in figures.items():
        print(f"{name:26} {value:.4g}")
    finish(figures, KEYS, args.json)


if __name__ == "__main__":
    main()
