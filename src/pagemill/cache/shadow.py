"""The index of a cache, rebuilt somewhere else from its events."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pagemill.core.events import BlockRemoved, BlockStored, CacheEvent
from pagemill.core.types import BlockHash, GroupId


@dataclass(frozen=True, slots=True)
class ShadowBlock:
    """A published block. ``parent`` is empty for a first one."""

    parent: BlockHash
    token_ids: tuple[int, ...]


class ShadowIndex:
    """Which blocks a cache has published, as its events tell it.

        empty --stored--> entry --removed--> gone;  cleared: all entries of all groups are gone

    1. With every event of a cache in order, the entries are the published blocks of its groups.
    2. Then all three counters of faults stay 0. A fault changes nothing that the event did not say:
       a block of unknown parent is kept, for a cache that has it will also say when it goes.
    3. A parent is asked for in full groups only: a window group may publish a block whose parent
       has left the window, or was never published there.
    """

    def __init__(self, window_groups: frozenset[GroupId] = frozenset()) -> None:
        self.window_groups = window_groups
        self.num_unknown_parents = 0
        """Blocks stored whose parent was not there."""
        self.num_unknown_removed = 0
        self.num_stored_again = 0
        self._groups: dict[GroupId, dict[BlockHash, ShadowBlock]] = {}

    @property
    def num_faults(self) -> int:
        """Events that cannot follow those seen so far: some were lost, or a cache does not say
        the truth."""
        return self.num_unknown_parents + self.num_unknown_removed + self.num_stored_again

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            found = self._groups.get(event.group, {}).pop(event.block_hash, None)
            self.num_unknown_removed += found is None
        else:
            self.clear()

    def _store(self, event: BlockStored) -> None:
        entries = self._groups.setdefault(event.group, {})
        if not event.is_first and event.group not in self.window_groups:
            self.num_unknown_parents += event.parent not in entries
        self.num_stored_again += event.block_hash in entries
        parent = BlockHash(b"") if event.is_first else event.parent
        entries[event.block_hash] = ShadowBlock(parent, event.token_ids)

    def clear(self) -> None:
        """Forget all entries; the counters stay."""
        self._groups.clear()

    def num_blocks(self, group: GroupId) -> int:
        return len(self._groups.get(group, ()))

    def blocks(self, group: GroupId) -> Mapping[BlockHash, ShadowBlock]:
        """The published blocks of ``group``, in the order in which they were stored."""
        return self._groups.get(group, {})

    def chain(self, group: GroupId, block_hash: BlockHash) -> Iterator[ShadowBlock]:
        """The block and those before it, last first, as far back as they are published."""
        entries = self._groups.get(group, {})
        block = entries.get(block_hash)
        while block is not None:
            yield block
            block = entries.get(block.parent)

    def prefix(self, group: GroupId, block_hash: BlockHash) -> tuple[int, ...]:
        """The token ids from the start of the chain to the end of the block."""
        parts = [block.token_ids for block in self.chain(group, block_hash)]
        return tuple(token_id for part in reversed(parts) for token_id in part)
