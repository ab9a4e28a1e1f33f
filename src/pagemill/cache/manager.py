"""The cache as its users see it: match, open, extend, commit, release."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from pagemill._native import CacheCore
from pagemill.cache.eviction import EvictionPolicy
from pagemill.cache.keys import chain_root
from pagemill.cache.prefix_index import PrefixMatch
from pagemill.cache.stats import CacheStats, GroupStats
from pagemill.cache.tails import TailSlots
from pagemill.core.errors import IntegrityError
from pagemill.core.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from pagemill.core.layers import TOKEN_GROUP, CacheConfig
from pagemill.core.retention import Retention
from pagemill.core.step import BlockCopy, GroupTables, SharedRun
from pagemill.core.types import BlockHash, BlockId, GroupId, IntBuffer, TableId


class CacheManager:
    """Blocks and prefixes of all layer groups of one model.

    A table is the list of blocks of one sequence, one list a group:

        open --> OPEN --extend, commit, ... --> OPEN --release--> gone
                   \\--fork--> a second OPEN table

        peek_match -> (can_admit) -> open -> { extend -> a step runs -> commit } ... -> release

    1. A match is good until the cache changes; ``open`` and ``can_admit`` refuse an older one.
    2. ``extend`` gives slots or changes nothing. It must precede every write, also after ``fork``.
    3. Only ``commit`` publishes, and only blocks whose last token is computed.
    4. Blocks that a running step reads or writes stay held: release a table after its last step is
       collected. The source of a copy is held until ``release_copies``, and so is all that a table
       holds that was released before.
    5. Each call is whole: a wrong one raises AssertionError and changes nothing.

    Token ids are any flat buffer of u32: ``array('I')`` or numpy uint32. Not for several threads.
    The states of a block and the invariants are in ``pagemill.cache.block``.
    """

    __slots__ = ("_core", "_fingerprint", "_on_event", "_server_key", "_tails", "config")

    def __init__(
        self,
        config: CacheConfig,
        *,
        server_key: bytes = b"",
        fingerprint: bytes = b"",
        on_event: Callable[[CacheEvent], None] | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """``policy``: one of your own in place of ``config.eviction``, for research."""
        self.config = config
        self._server_key = server_key
        self._fingerprint = fingerprint
        self._on_event = on_event
        self._tails = TailSlots(config.num_tails)
        self._core = CacheCore(
            config.num_blocks,
            [group.window or 0 for group in config.groups],
            config.block_size,
            config.prefix_index != "off",
            config.prefix_index == "radix",
            on_event is not None,
            config.eviction,
        )
        if policy is not None:
            self._core.set_policy(policy)
        if config.has_shares:
            for group, num_blocks in enumerate(config.num_blocks):
                quota = max(1, int(config.tenant_quota * (num_blocks - 1)))
                self._core.set_shares(group, quota, config.is_fair)

    # matching

    def namespace(
        self, *, tenant: str = "", salt: str = "", adapter: str = "", media: Sequence[str] = ()
    ) -> bytes:
        """The root of all chains that may share: equal only for equal fields, key and model."""
        return chain_root(self._server_key, self._fingerprint, tenant, salt, adapter, media)

    def peek_match(self, token_ids: IntBuffer, namespace: bytes, keys: bytes = b"") -> PrefixMatch:
        """The longest cached prefix of ``token_ids`` [num_tokens], at most num_tokens - 1.

        ``keys``: the chained hashes of all full blocks, 32 bytes each, where they are known; the
        flat index then need not hash.
        """
        native = self._core.peek_match(token_ids, namespace, keys)
        whole = native.num_tokens // TOKEN_GROUP * TOKEN_GROUP
        if self.config.codes_whole_groups and whole != native.num_tokens:
            shorter = memoryview(cast(Any, token_ids))[: whole + 1]
            native = self._core.peek_match(shorter, namespace, b"")
        return PrefixMatch(native.num_tokens, namespace, native)

    def floor_match(self, match: PrefixMatch) -> PrefixMatch:
        """The whole blocks of ``match``: what a pool can take that has no room for a copy."""
        native = self._core.floor(match.native)
        return PrefixMatch(native.num_tokens, match.namespace, native)

    def can_admit(
        self,
        match: PrefixMatch,
        num_tokens: int,
        *,
        reserve_blocks: int = 0,
        chunk_tokens: int | None = None,
    ) -> bool:
        """Could a table opened from ``match`` grow to ``num_tokens`` now?

        ``reserve_blocks`` must be left in every full group. A window group is asked only for what
        is held at a time when at most ``chunk_tokens`` are computed in a step (None: all at once).
        The matched blocks are not counted as evictable: opening the table takes them.
        """
        if not self._tails.has_free:
            return False
        return self._core.can_admit(match.native, num_tokens, reserve_blocks, chunk_tokens or 0)

    # tables

    def open(
        self,
        match: PrefixMatch,
        namespace: bytes,
        *,
        is_resumed: bool = False,
        tenant: int = 0,
    ) -> TableId:
        """A table that holds the matched blocks. Nothing may happen between peek and open.

        ``is_resumed``: a preempted sequence comes back; what it finds is not a hit of its prompt.
        ``tenant``: whose share of the pool its blocks count against.
        """
        assert match.namespace == namespace, "open: this match was made in another namespace"
        table = TableId(self._core.open(match.native, is_resumed, tenant))
        self._tails.take(table)
        return table

    def num_tokens_cached(self, table: TableId) -> int:
        """Tokens that the match gave when the table was opened."""
        return self._core.num_cached(table)

    def extend(self, table: TableId, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Slots for the tokens [0, num_tokens), in every group; evicts as needed.

        None: not now, and nothing has changed. The copies belong to the next step; give them to
        ``release_copies`` when it is collected, or when it is not run.
        """
        native = self._core.extend(table, num_tokens)
        if self._on_event is not None:
            self._tell_events(self._on_event)
        if not native:
            return None if native is None else ()
        return tuple(
            BlockCopy(GroupId(group), BlockId(source), BlockId(target))
            for group, source, target in native
        )

    def extend_all(
        self, tables: Sequence[TableId], num_tokens: Sequence[int]
    ) -> tuple[int, tuple[BlockCopy, ...]]:
        """``extend`` of one table after the other in one call, as far as there are slots.

        How many tables were extended, and the copies of all of them.
        """
        num_done, native = self._core.extend_all(tables, num_tokens)
        if self._on_event is not None:
            self._tell_events(self._on_event)
        return num_done, tuple(
            BlockCopy(GroupId(group), BlockId(source), BlockId(target))
            for group, source, target in native
        )

    def commit_all(
        self, tables: Sequence[TableId], token_ids: list[IntBuffer], num_computed: Sequence[int]
    ) -> None:
        """``commit`` of one table after the other in one call."""
        self._core.commit_all(tables, token_ids, num_computed)
        if self._on_event is not None:
            self._tell_events(self._on_event)

    def release_copies(self, copies: Iterable[BlockCopy]) -> None:
        """The copies are done: their sources need not be held any longer."""
        self._core.release_copies([(copy.group, copy.source, copy.target) for copy in copies])
        if self._on_event is not None and self.config.has_shares:
            self._tell_events(self._on_event)  # a released table may have waited for this

    def commit(self, table: TableId, token_ids: IntBuffer, num_computed_tokens: int) -> None:
        """The KV of ``token_ids`` [0, num_computed_tokens) is there and final.

        ``token_ids`` is the whole sequence. Full blocks are published; blocks that left a window
        are given back.
        """
        self._core.commit(table, token_ids, num_computed_tokens)
        if self._on_event is not None:
            self._tell_events(self._on_event)

    def fork(self, table: TableId) -> TableId:
        """A second table with the same computed tokens; their blocks are shared. Copies into the
        first must be done: see ``release_copies``."""
        assert self._tails.has_free, "fork: every tail slot is taken"
        twin = TableId(self._core.fork(table))
        self._tails.take(twin)
        return twin

    def release(
        self, table: TableId, *, is_finished: bool = True, has_tool_calls: bool = False
    ) -> None:
        """Ends the table. Published blocks stay findable until they are evicted.

        For the eviction policy: did its request finish (else it was preempted or cut short), and
        did the answer call tools?
        """
        self._core.release(table, is_finished, has_tool_calls)
        self._tails.give_back(table)
        if self._on_event is not None and self.config.has_shares:
            self._tell_events(self._on_event)

    def num_blocks(self, table: TableId, group: GroupId) -> int:
        """Entries of the table in ``group``, those that left the window included."""
        return self._core.num_table_blocks(table, group)

    def block_tables(self, table_ids: Sequence[TableId]) -> tuple[GroupTables, ...]:
        """The tables side by side, one entry a group; the form that a step plan carries."""
        return tuple(
            GroupTables(*self._core.block_tables(table_ids, group))
            for group in range(len(self.config.groups))
        )

    def tail_slots(self, tables: Sequence[TableId]) -> tuple[int, ...]:
        """The tail slot of each table, where the KV format codes whole groups; else none. A forked
        table starts with an empty one: copy the slot of the first (``KVStorage.copy_tails``)."""
        return self._tails.of(tables)

    def shared_runs(self, tables: Sequence[TableId], group: GroupId) -> tuple[SharedRun, ...]:
        """Every run of blocks that two or more of the tables share: what attention may read once
        for all of them."""
        runs = self._core.shared_runs(tables, group)
        return tuple(SharedRun(first, count, tuple(members)) for first, count, members in runs)

    # keeping and forgetting

    def retain(self, table: TableId, retention: Retention, tenant: int) -> None:
        """What the table publishes from now on is kept as ``retention`` says, and what it holds
        already at least so; a lifetime starts at the time of the last ``advance``.

        ``tenant``, from 1: whose pins these are; each has a budget of half the pool.
        """
        pinned_by = tenant if retention.is_pinned else 0
        self._core.retain(table, retention.band, retention.ttl_ns or 0, pinned_by)

    def forget(self, token_ids: IntBuffer, namespace: bytes) -> int:
        """Drops what goes on from all of ``token_ids``, and then their own blocks from the last
        one, as far as nobody holds them and nothing else goes on from them; says how many."""
        num_gone = self._core.forget_prefix(token_ids, namespace)
        if self._on_event is not None:
            self._tell_events(self._on_event)
        return num_gone

    def forget_namespace(self, namespace: bytes) -> int:
        """Drops all that is cached under ``namespace`` and not held; says how many blocks."""
        num_gone = self._core.forget_root(namespace)
        if self._on_event is not None:
            self._tell_events(self._on_event)
        return num_gone

    # the whole

    def max_tokens(self, chunk_tokens: int | None = None) -> int:
        """The longest sequence that fits the empty pool; ``sys.maxsize`` where nothing limits it.

        A window group limits nothing when it holds one window and ``chunk_tokens`` more.
        """
        longest = sys.maxsize
        for group, num_blocks in zip(self.config.groups, self.config.num_blocks, strict=True):
            if group.window is not None and chunk_tokens is not None:
                if self.config.window_blocks(group.window, chunk_tokens) < num_blocks:
                    continue
            longest = min(longest, (num_blocks - 1) * self.config.block_size)
        return longest

    def advance(self, now_ns: int) -> None:
        """The time, for eviction policies that ask for ages; it never goes back."""
        self._core.advance(now_ns)

    def evict(self, num_blocks: int, group: GroupId) -> int:
        """Evicts in the policy's order; says how many: fewer only when no more are evictable."""
        num_evicted = self._core.evict(group, num_blocks)
        if self._on_event is not None:
            self._tell_events(self._on_event)
        return num_evicted

    def reset(self) -> bool:
        """Forgets everything cached. False, and nothing done, while a table is open."""
        if not self._core.reset():
            return False
        if self._on_event is not None:
            self._tell_events(self._on_event)
            self._on_event(CacheCleared())
        return True

    def usage(self) -> float:
        """Held blocks of all blocks, 0 to 1, in the group that is fullest."""
        return max(group.num_held / (group.num_blocks - 1) for group in self._group_stats())

    def stats(self) -> CacheStats:
        """Counters since the start, and what is held now."""
        return CacheStats(self._group_stats(), *self._core.core_counts())

    def num_dropped_pins(self) -> int:
        """Blocks of all groups that lost their pin because their tenant was over its budget."""
        return sum(map(self._core.num_dropped_pins, range(len(self.config.groups))))

    def check_integrity(self, level: int = 2) -> None:
        """Raises IntegrityError for the first invariant that does not hold.

        Level 0 compares counters, 1 walks lists, tables and references, 2 the index as well.
        """
        failure = self._core.check(level)
        if failure is not None:
            raise IntegrityError(*failure)
        self._tails.check(self.stats().num_open_tables)

    def _group_stats(self) -> tuple[GroupStats, ...]:
        groups = range(len(self.config.groups))
        return tuple(GroupStats(*self._core.group_counts(group)) for group in groups)

    def _tell_events(self, on_event: Callable[[CacheEvent], None]) -> None:
        for group, name, parent, position, tokens in self._core.take_events(self.config.block_size):
            group_id, block_hash = GroupId(group), BlockHash(name)
            if parent:
                parent_hash = BlockHash(parent)
                on_event(BlockStored(group_id, block_hash, parent_hash, tokens, position == 0))
            else:
                on_event(BlockRemoved(group_id, block_hash))
