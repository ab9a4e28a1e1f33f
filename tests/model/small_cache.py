"""A small cache and the few calls that the stories of tests/cache are told with."""

from array import array
from collections.abc import Callable

from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.core.events import CacheEvent
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
    """Opens, copies, computes everything, commits."""
    table = start(cache, prompt)
    copies = cache.extend(table, len(prompt))
    assert copies is not None
    cache.release_copies(copies)
    cache.commit(table, prompt, len(prompt))
    return table


def cached(cache: CacheManager, prompt: array) -> int:
    return cache.peek_match(prompt, cache.namespace()).num_tokens


def blocks(cache: CacheManager, table: TableId, group: int = 0) -> list[int]:
    return [int(block) for block in cache.block_tables([table])[group].block_ids]
