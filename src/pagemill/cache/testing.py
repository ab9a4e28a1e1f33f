"""Hooks for tests and nothing else: they make a cache lie, so that a check can be seen to fail.

``keep_hash_bytes``      different blocks get the same hash
``swap_cached_blocks``   a hit returns another block's KV: the negative control of equality tests
``evictable_blocks``     the order in which blocks will be evicted
"""

from pagemill.cache.manager import CacheManager
from pagemill.core.types import BlockId, GroupId


def keep_hash_bytes(cache: CacheManager, num_bytes: int) -> None:
    """Block hashes keep their first ``num_bytes`` bytes; 0 makes all of them equal."""
    cache._core.keep_hash_bytes(num_bytes)


def swap_cached_blocks(cache: CacheManager, group: GroupId, a: BlockId, b: BlockId) -> None:
    """Each of two evictable blocks is from now on found under the other's hash."""
    cache._core.swap_cached_blocks(group, a, b)


def evictable_blocks(cache: CacheManager, group: GroupId) -> tuple[BlockId, ...]:
    """The evictable blocks of ``group``, the next victim first."""
    return tuple(BlockId(block) for block in cache._core.evictable_blocks(group))
