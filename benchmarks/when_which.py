"""Flat or radix, blocks of 16 or 64: what each saves and costs on five kinds of traffic.

    chat        multi-turn conversations, each turn after the one before
    agent       one loop of tool calls: a long prompt that grows, now and then cut back
    system      one system prompt, every ending new
    best_of_n   a judge reads one document with n candidate answers behind it
    beam        candidates that part token by token from a common stem

Every prompt is computed and cached; nothing is evicted. Saved: of all prompt tokens, those found.

    python benchmarks/when_which.py [--quick] [--json FILE]
"""

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from common import finish, make_parser
from pagemill import CacheConfig, CacheManager, LayerGroup

VOCABULARY = 50_000
KEYS = ("chat_radix_over_flat16", "beam_radix_over_flat16", "lookup_us_radix16", "lookup_us_flat16")

Prompts = Iterator[list[int]]


def words(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


def chat(rng: random.Random, scale: int) -> Prompts:
    system = words(rng, 300, 300)
    for _ in range(10 * scale):
        talk = [*system]
        for _ in range(rng.randint(2, 10)):
            talk += words(rng, 10, 120)
            yield [*talk]
            talk += words(rng, 50, 300)


def agent(rng: random.Random, scale: int) -> Prompts:
    for _ in range(scale):
        log = words(rng, 4000, 6000)
        for _ in range(40):
            log += words(rng, 60, 900)
            yield [*log]
            if rng.random() < 0.05:
                del log[-rng.randint(100, 2000) :]


def system(rng: random.Random, scale: int) -> Prompts:
    stem = words(rng, 700, 700)
    for _ in range(80 * scale):
        yield stem + words(rng, 20, 200)


def best_of_n(rng: random.Random, scale: int) -> Prompts:
    for _ in range(8 * scale):
        document = words(rng, 300, 900)
        for _ in range(8):
            yield document + words(rng, 30, 120)


def beam(rng: random.Random, scale: int) -> Prompts:
    for _ in range(4 * scale):
        beams = [words(rng, 200, 300)] * 4
        for _ in range(30):
            grown = [stem + words(rng, 1, 1) for stem in rng.choices(beams, k=4)]
            beams = grown
            yield from beams


KINDS: dict[str, Callable[[random.Random, int], Prompts]] = {
    "chat": chat,
    "agent": agent,
    "system": system,
    "best_of_n": best_of_n,
    "beam": beam,
}


def measure(prompts: list[list[int]], index: str, block_size: int) -> dict[str, float]:
    num_blocks = 64 + sum(len(prompt) // block_size + 2 for prompt in prompts)
    config = CacheConfig((LayerGroup("full", (0,)),), (num_blocks,), block_size, index)
    cache = CacheManager(config)
    root, before = cache.namespace(), cache._core.num_bytes(0)[1]
    times, hits, held = [], 0, 0
    for ids in prompts:
        prompt = array("I", ids)
        start = time.perf_counter()
        match = cache.peek_match(prompt, root)
        times.append(time.perf_counter() - start)
        hits += match.num_tokens
        table = cache.open(match, root)
        copies = cache.extend(table, len(prompt))
        assert copies is not None
        cache.release_copies(copies)
        cache.commit(table, prompt, len(prompt))
        cache.release(table)
    held = cache.stats().groups[0].num_evictable
    # flat keeps a fixed row for each block of the pool: counted for the blocks in use
    row_bytes = before / num_blocks
    grown = cache._core.num_bytes(0)[1] - before
    return {
        "saved": hits / sum(map(len, prompts)),
        "lookup_us": statistics.median(times) * 1e6,
        "index_bytes_per_token": (held * row_bytes + grown) / max(1, held * block_size),
        "blocks": held,
    }


def exact(prompts: list[list[int]]) -> float:
    """What token-exact reuse of everything seen can save: brute force over a trie."""
    trie: dict[int, Any] = {}
    hits = 0
    for prompt in prompts:
        node, depth, is_known = trie, 0, True
        for token in prompt:
            is_known = is_known and token in node
            depth += is_known
            node = node.setdefault(token, {})
        hits += min(depth, len(prompt) - 1)
    return hits / sum(map(len, prompts))


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    scale = 1 if args.quick else 4
    table = Table("traffic", "requests", "exact", "index", "saved", "lookup us", "bytes/token")
    rows: list[dict[str, Any]] = []
    for kind, make in KINDS.items():
        prompts = list(make(random.Random(1), scale))
        bound = exact(prompts)
        for index, block_size in (("radix", 16), ("flat", 16), ("radix", 64), ("flat", 64)):
            found = measure(prompts, index, block_size)
            rows.append({"traffic": kind, "index": index, "block_size": block_size, **found})
            table.add_row(
                kind,
                str(len(prompts)),
                f"{bound:.1%}",
                f"{index} {block_size}",
                f"{found['saved']:.1%}",
                f"{found['lookup_us']:.1f}",
                f"{found['index_bytes_per_token']:.1f}",
            )
            assert index == "flat" or abs(found["saved"] - bound) < 1e-12, "radix is not exact"
    Console().print(table)
    found = {(r["traffic"], r["index"], r["block_size"]): r for r in rows}

    def missed(kind: str) -> float:
        """Prompt tokens that flat computes for each that radix computes, blocks of 16."""
        radix, flat = found[kind, "radix", 16], found[kind, "flat", 16]
        return float((1 - flat["saved"]) / (1 - radix["saved"]))

    figures = {
        "rows": rows,
        "chat_radix_over_flat16": missed("chat"),
        "beam_radix_over_flat16": missed("beam"),
        "lookup_us_radix16": found["agent", "radix", 16]["lookup_us"],
        "lookup_us_flat16": found["agent", "flat", 16]["lookup_us"],
    }
    finish(figures, KEYS, args.json)


if __name__ == "__main__":
    main()
