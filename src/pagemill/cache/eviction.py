"""An eviction policy of your own, for research: handed to ``CacheManager(policy=...)``.

The built-in policies are compiled (``csrc/cache/eviction``: a new one is a file and a line in the
registry there) and chosen by ``CacheConfig.eviction``. A policy in Python costs two calls a block.
Only leaves are ever ranked: published blocks that nobody holds and that have no cached child.
"""

from typing import Protocol

from pagemill.core.types import BlockId, GroupId


class EvictionPolicy(Protocol):
    """Ranks leaves. One policy object serves one cache: a block is (``group``, ``block_id``), since
    each layer group has a pool of its own.

    A policy must not raise: the error reaches the caller, but the cache was in the middle of
    something and is of no more use.
    """

    def touch(
        self, group: GroupId, block_id: BlockId, key: int, position: int, now_ns: int, is_new: bool
    ) -> None:
        """The block was published (``is_new``), or a prompt found it.

        ``key`` (64 bits) is the same whenever the same content comes again; ``position`` counts
        blocks from the start of the prompt; ``now_ns`` is the time of the last ``advance``.
        """

    def rank(self, group: GroupId, block_id: BlockId, now_ns: int) -> float:
        """The smallest rank is evicted first; of equals the one that became a leaf first.

        Asked when the block becomes a leaf, and again before it goes: so a rank may grow in time,
        but one that falls is seen only when the block becomes a leaf anew.
        """

    def drop(self, group: GroupId, block_id: BlockId) -> None:
        """The block was evicted: its id will stand for something else."""
