"""What happened to the cache, as values: enough to rebuild the index elsewhere (a shadow index)."""

from dataclasses import dataclass

from pagemill.core.types import BlockHash, GroupId


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block was published under ``block_hash``.

    ``parent`` is the hash of the block before it. Of a first block (``is_first``) it is the root:
    tenant, salt and model; events that came over a wire may leave it empty there. In a full group
    the parent is published when its child is; in a window group it need not be.
    """

    group: GroupId
    block_hash: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The index entry of ``block_hash`` in ``group`` is gone."""

    group: GroupId
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every index entry of every group is gone."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared
