"""What happened to the cache, as values: enough to rebuild the index elsewhere (a shadow index)."""

from dataclasses import dataclass

from pagemill.core.types import BlockHash, GroupId


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block was published under ``block_hash``; ``parent`` is the root for a first block."""

    group: GroupId
    block_hash: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The index entry of ``block_hash`` in ``group`` is gone."""

    group: GroupId
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every index entry of every group is gone."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared
