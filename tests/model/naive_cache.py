"""The cache in plain Python: lists, no hashes, nothing clever. The compiled one must agree.

Keys are the tokens themselves: (namespace, tokens up to the end of the block). The order of
eviction is the order of a Python list. Block ids are not modelled: blocks are objects, and a test
checks that real ids and these objects stand one to one.

With ``is_radix`` and one group the rest of a sequence stays as a tail: a block under the key of
fewer than a block's tokens. Where several blocks begin with the tokens asked for, any of them is
right, so the test says which one the real cache took.
"""

from dataclasses import dataclass, field

Key = tuple[bytes, tuple[int, ...]]


@dataclass(eq=False)
class NaiveBlock:
    ref_count: int = 1


@dataclass(eq=False)
class NaiveTable:
    namespace: bytes
    num_committed: int
    num_published: int
    blocks: list[list[NaiveBlock | None]]
    noted: tuple[NaiveBlock, Key] | None = None
    num_copies: int = 0


NaiveCopy = tuple[int, NaiveBlock, NaiveTable]
"""(group, source, the table it is made for)."""


@dataclass(eq=False)
class NaiveGroup:
    window: int | None
    num_empty: int
    published: dict[Key, NaiveBlock] = field(default_factory=dict)
    twins: dict[Key, list[NaiveBlock]] = field(default_factory=dict)
    evictable: list[NaiveBlock] = field(default_factory=list)
    evicted_keys: list[Key] = field(default_factory=list)
    tails: dict[Key, NaiveBlock] = field(default_factory=dict)

    def is_cached(self, block: NaiveBlock) -> bool:
        return self.key_of(block) is not None or block in self.tails.values()

    def beginning_with(self, key: Key, block_size: int) -> list[NaiveBlock]:
        """Blocks at the place of the key's last tokens that begin with them."""
        namespace, tokens = key
        place = len(tokens) // block_size
        return [
            block
            for (other, held), block in [*self.published.items(), *self.tails.items()]
            if other == namespace
            and (len(held) - 1) // block_size == place
            and held[: len(tokens)] == tokens
        ]

    def displace(self, key: Key, block_size: int) -> None:
        """The tail that ``key`` goes on from is no longer found."""
        namespace, tokens = key
        for tail in list(self.tails):
            if (
                tail[0] == namespace
                and (len(tail[1]) - 1) // block_size == (len(tokens) - 1) // block_size
            ):
                if tokens[: len(tail[1])] == tail[1]:
                    block = self.tails.pop(tail)
                    if block in self.evictable:
                        self.evictable.remove(block)
                        self.num_empty += 1

    def key_of(self, block: NaiveBlock) -> Key | None:
        return next((key for key, other in self.published.items() if other is block), None)

    def take(self, block: NaiveBlock) -> None:
        if block in self.evictable:
            self.evictable.remove(block)
        block.ref_count += 1

    def give(self, block: NaiveBlock) -> None:
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        for twins in self.twins.values():
            if block in twins:
                twins.remove(block)
        key = self.key_of(block)
        if block in self.tails.values() or (key is not None and not self.twins.get(key)):
            self.evictable.append(block)
            return
        if key is not None:
            self.published[key] = self.twins[key].pop(0)
        self.num_empty += 1

    def evict(self, count: int) -> int:
        victims, self.evictable = self.evictable[:count], self.evictable[count:]
        for block in victims:
            key = self.key_of(block)
            if key is None:
                self.tails = {k: tail for k, tail in self.tails.items() if tail is not block}
                continue
            del self.published[key]
            self.evicted_keys.append(key)
        self.num_empty += len(victims)
        return len(victims)

    def allocate(self) -> NaiveBlock:
        if self.num_empty == 0:
            self.evict(1)
        assert self.num_empty > 0
        self.num_empty -= 1
        return NaiveBlock()

    def publish(self, key: Key, block: NaiveBlock, block_size: int) -> None:
        self.displace(key, block_size)
        other = self.published.get(key)
        if other is not None and other.ref_count > 0:
            self.twins.setdefault(key, []).append(block)
            return
        if other is not None:
            self.evictable.remove(other)
            self.num_empty += 1
        self.published[key] = block


class NaiveCache:
    def __init__(
        self,
        num_blocks: list[int],
        windows: list[int | None],
        block_size: int,
        *,
        is_radix: bool = False,
    ) -> None:
        self.block_size = block_size
        self.is_exact = is_radix and windows == [None]
        self.groups = [NaiveGroup(w, n - 1) for n, w in zip(num_blocks, windows, strict=True)]
        self.tables: list[NaiveTable] = []

    def needed(self, group: NaiveGroup, num_tokens: int) -> range:
        """Blocks that a token at position ``num_tokens`` reads, of those before it."""
        start = 0 if group.window is None else max(0, num_tokens - group.window + 1)
        return range(start // self.block_size, num_tokens // self.block_size)

    def key(self, namespace: bytes, tokens: list[int], j: int) -> Key:
        return namespace, tuple(tokens[: (j + 1) * self.block_size])

    def match(self, tokens: list[int], namespace: bytes) -> int:
        for n in range(max(0, len(tokens) - 1) // self.block_size * self.block_size, 0, -1):
            if n % self.block_size == 0 and all(
                self.key(namespace, tokens, j) in group.published
                for group in self.groups
                for j in self.needed(group, n)
            ):
                return n
        return 0

    def exact_match(self, tokens: list[int], namespace: bytes) -> int:
        """Tokens of whole blocks and of the one that begins with most of what follows."""
        aligned = self.match(tokens, namespace)
        if not self.is_exact:
            return aligned
        for n in range(min(len(tokens) - 1, aligned + self.block_size - 1), aligned, -1):
            key = namespace, tuple(tokens[:n])
            if self.groups[0].beginning_with(key, self.block_size):
                return n
        return aligned

    def open(
        self, tokens: list[int], namespace: bytes, source: NaiveBlock | None = None
    ) -> NaiveTable:
        n = self.exact_match(tokens, namespace)
        table = NaiveTable(namespace, n, n // self.block_size, [])
        for group in self.groups:
            blocks: list[NaiveBlock | None] = [None] * table.num_published
            for j in self.needed(group, n):
                blocks[j] = group.published[self.key(namespace, tokens, j)]
                group.take(blocks[j])
            if n % self.block_size:
                key = namespace, tuple(tokens[:n])
                assert source in group.beginning_with(key, self.block_size)
                group.take(source)
                blocks.append(source)
            table.blocks.append(blocks)
        self.tables.append(table)
        return table

    def copied_entry(self, table: NaiveTable, g: int, num_tokens: int) -> int | None:
        j, filled = divmod(table.num_committed, self.block_size)
        if num_tokens <= table.num_committed or filled == 0:
            return None
        block = table.blocks[g][j]
        return j if block.ref_count > 1 or self.groups[g].is_cached(block) else None

    def extend(self, table: NaiveTable, num_tokens: int) -> list[NaiveCopy] | None:
        """None: not now."""
        num_entries = -(-num_tokens // self.block_size)
        for g, group in enumerate(self.groups):
            missing = max(0, num_entries - len(table.blocks[g]))
            missing += self.copied_entry(table, g, num_tokens) is not None
            if missing > group.num_empty + len(group.evictable):
                return None
        copies = []
        for g, group in enumerate(self.groups):
            j = self.copied_entry(table, g, num_tokens)
            if j is not None:
                copies.append((g, table.blocks[g][j], table))
                table.num_copies += 1
                table.blocks[g][j] = group.allocate()
            while len(table.blocks[g]) < num_entries:
                table.blocks[g].append(group.allocate())
        return copies

    def release_copies(self, copies: list[NaiveCopy]) -> None:
        for g, source, table in copies:
            self.groups[g].give(source)
            table.num_copies -= 1
            if table.num_copies == 0 and table not in self.tables:
                self.close(table)

    def commit(self, table: NaiveTable, tokens: list[int], num_computed: int) -> None:
        table.num_committed = num_computed
        while (table.num_published + 1) * self.block_size <= num_computed:
            j = table.num_published
            live = [(g, t[j]) for g, t in enumerate(table.blocks) if t[j] is not None]
            if any(block.ref_count > 1 for _, block in live):
                break
            for g, block in live:
                key = self.key(table.namespace, tokens, j)
                self.groups[g].publish(key, block, self.block_size)
            table.num_published += 1
        self.note_tail(table, tokens)
        if table.num_copies:  # the targets of copies must not become others'
            return
        for g, group in enumerate(self.groups):
            first = min([*self.needed(group, num_computed), num_computed // self.block_size])
            for j in range(first):
                if table.blocks[g][j] is not None:
                    group.give(table.blocks[g][j])
                    table.blocks[g][j] = None

    def note_tail(self, table: NaiveTable, tokens: list[int]) -> None:
        table.noted = None
        j, filled = divmod(table.num_committed, self.block_size)
        if self.is_exact and filled:
            block = table.blocks[0][j]
            if block.ref_count == 1 and not self.groups[0].is_cached(block):
                key = table.namespace, tuple(tokens[: table.num_committed])
                table.noted = block, key

    def keep_tail(self, table: NaiveTable) -> None:
        j = table.num_committed // self.block_size
        if table.noted is None or table.num_published < j:
            return
        block, key = table.noted
        group = self.groups[0]
        if table.blocks[0][j] is not block or block.ref_count > 1:
            return
        if not group.beginning_with(key, self.block_size):
            group.displace(key, self.block_size)
            group.tails[key] = block

    def fork(self, table: NaiveTable) -> NaiveTable:
        num_shared = -(-table.num_committed // self.block_size)
        blocks = [list(entries[:num_shared]) for entries in table.blocks]
        for group, entries in zip(self.groups, blocks, strict=True):
            for block in filter(None, entries):
                group.take(block)
        fresh = NaiveTable(table.namespace, table.num_committed, table.num_published, blocks)
        fresh.noted = table.noted
        self.tables.append(fresh)
        return fresh

    def release(self, table: NaiveTable) -> None:
        self.tables.remove(table)
        if table.num_copies == 0:
            self.close(table)

    def close(self, table: NaiveTable) -> None:
        """Blocks of a released table come back when the copies made for it are done."""
        self.keep_tail(table)
        for group, entries in zip(self.groups, table.blocks, strict=True):
            for block in filter(None, reversed(entries)):
                group.give(block)
