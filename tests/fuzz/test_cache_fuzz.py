"""Random operations on the real cache and on the naive one, compared after each of them.

A third party watches: the KV itself, as one number a slot, written and copied as a step would. So a
wrong block is seen even where both caches agree on it.
"""

import copy
import random
from array import array
from dataclasses import dataclass, field

import pytest

from model.naive_cache import NaiveBlock, NaiveCache, NaiveCopy, NaiveTable
from model.seeds import fuzz_seeds
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill._native import chain_hash
from pagemill.cache.prefix_index import PrefixMatch
from pagemill.cache.shadow import ShadowIndex
from pagemill.cache.testing import evictable_blocks
from pagemill.core.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from pagemill.core.step import BlockCopy
from pagemill.core.types import GroupId, TableId
from pagemill.server.kv_wire import EventBatch, Packer, unpack

B = 16
WINDOWS = ((None,), (None,), (None, 24), (40,), (None, 17, 64), (None, None), (1,))
OPERATIONS = ("open", "step", "commit", "fork", "release", "copies", "evict", "admit", "wrong")


@dataclass(eq=False)
class Sequence:
    table: TableId
    naive: NaiveTable
    namespace: bytes
    tokens: list[int]
    num_written: int = 0
    marks: list[int] = field(default_factory=list)


class Shadow:
    """The index rebuilt from events alone."""

    def __init__(self, roots: list[bytes], has_parents: list[bool]) -> None:
        self.prefixes: dict[bytes, tuple[bytes, tuple[int, ...]]] = {r: (r, ()) for r in roots}
        self.cached: list[dict[bytes, tuple[bytes, tuple[int, ...]]]] = [{} for _ in has_parents]
        self.removed: list[list[tuple[bytes, tuple[int, ...]]]] = [[] for _ in has_parents]
        self.roots, self.has_parents = set(roots), has_parents

    def learn(self, namespace: bytes, tokens: list[int]) -> None:
        """Which prefix a hash means: a window group may publish a block without its parent."""
        keys = chain_hash(namespace, array("I", tokens), B)
        for j in range(len(tokens) // B):
            self.prefixes[keys[32 * j : 32 * j + 32]] = namespace, tuple(tokens[: (j + 1) * B])

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, BlockStored):
            assert event.is_first == (event.parent in self.roots)
            known = event.is_first or event.parent in self.cached[event.group]
            assert known or not self.has_parents[event.group], "a stored block of unknown parent"
            namespace, prefix = self.prefixes[event.parent]
            assert self.prefixes[event.block_hash] == (namespace, prefix + event.token_ids)
            assert event.block_hash not in self.cached[event.group]
            self.cached[event.group][event.block_hash] = self.prefixes[event.block_hash]
        elif isinstance(event, BlockRemoved):
            self.removed[event.group].append(self.cached[event.group].pop(event.block_hash))
        else:
            assert isinstance(event, CacheCleared)
            for cached in self.cached:
                cached.clear()


class Harness:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        windows = list(self.random.choice(WINDOWS))
        num_blocks = [self.random.randrange(4, 40) for _ in windows]
        groups = tuple(LayerGroup(f"g{i}", (i,), w) for i, w in enumerate(windows))
        index = self.random.choice(("flat", "radix", "radix"))
        config = CacheConfig(groups, tuple(num_blocks), B, prefix_index=index)
        roots = [CacheManager(config).namespace(salt=salt) for salt in ("", "other")]
        self.shadow = Shadow(roots, [window is None for window in windows])
        self.events: list[CacheEvent] = []  # since the last comparison
        self.packer = Packer(groups, roots[0], int_hashes=seed % 2 == 0)
        self.follower = ShadowIndex()  # knows only what went over the wire
        self.real = CacheManager(config, on_event=self.hear)
        self.naive = NaiveCache(num_blocks, windows, B, is_radix=index == "radix")
        self.closing: list[tuple[NaiveTable, list[list[int]]]] = []  # released, with copies left
        self.naive_of: dict[int, NaiveBlock] = {}  # of group 0, since the last comparison
        self.roots = roots
        self.sequences: list[Sequence] = []
        self.copies: list[tuple[tuple[BlockCopy, ...], list[NaiveCopy]]] = []
        self.kv: list[dict[int, list[int]]] = [{} for _ in windows]
        self.known: list[list[int]] = [[]]
        self.num_copies = self.num_refused = self.num_partial = 0
        self.weights = [self.random.choice((0, 1, 3, 6)) for _ in OPERATIONS]
        self.weights[:3] = [
            weight + base for weight, base in zip(self.weights, (2, 6, 6), strict=False)
        ]

    def hear(self, event: CacheEvent) -> None:
        self.shadow(event)
        self.events.append(event)

    # operations

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            name = self.random.choices(OPERATIONS, self.weights)[0]
            getattr(self, f"do_{name}")()
            self.compare()
        while self.sequences:
            self.do_release()
            self.compare()
        while self.copies:
            self.do_copies()
        assert self.real.reset()
        self.real.check_integrity()
        assert not any(self.shadow.cached)
        assert all(g.num_empty == g.num_blocks - 1 for g in self.real.stats().groups)

    def prompt(self) -> list[int]:
        """Mostly one of the last prompts again, or the beginning of one and a few tokens more."""
        known = self.random.choice(self.known[-8:])
        cut = self.random.choice((0, len(known), len(known), self.random.randrange(len(known) + 1)))
        tail = [self.random.randrange(2) for _ in range(self.random.choice((0, 0, 1, 15, 17, 50)))]
        self.known.append(known[:cut] + tail)
        return self.known[-1][:200]

    def do_open(self) -> None:
        if len(self.sequences) >= 6:
            return self.do_release()
        tokens, namespace = list(self.prompt()), self.random.choice(self.roots[:1] * 3 + self.roots)
        match = self.real.peek_match(array("I", tokens), namespace)
        assert match.num_tokens == self.naive.exact_match(tokens, namespace)  # invariant 6
        assert match.num_tokens <= max(0, len(tokens) - 1)  # invariant 10
        self.num_partial += match.num_tokens % B > 0
        table = self.real.open(match, namespace)
        naive = self.naive.open(tokens, namespace, self.source(match))
        sequence = Sequence(table, naive, namespace, tokens, match.num_tokens)
        self.sequences.append(sequence)
        self.check_kv(sequence)

    def source(self, match: PrefixMatch) -> NaiveBlock | None:
        """The block that is partly matched."""
        if match.num_tokens % B == 0:
            return None
        return self.naive_of[match.block_ids(GroupId(0))[-1]]

    def pick(self) -> Sequence | None:
        return self.random.choice(self.sequences) if self.sequences else None

    def do_step(self) -> None:
        """Extend, then write the KV as the step would; committed later."""
        sequence = self.pick()
        if sequence is None:
            return
        missing = max(0, len(sequence.tokens) - sequence.num_written)
        wanted = sequence.num_written + self.random.choice((0, 1, missing, missing, 16, 30))
        real = self.real.extend(sequence.table, wanted)
        naive = self.naive.extend(sequence.naive, wanted)
        assert (real is None) == (naive is None)
        if real is None or naive is None:
            self.num_refused += 1
            return
        assert [c.group for c in real] == [group for group, _, _ in naive]
        self.num_copies += len(real)
        if real:
            self.copies.append((real, naive))
        for copied in real:
            self.kv[copied.group][copied.target] = list(self.kv[copied.group][copied.source])
        while len(sequence.tokens) < wanted:
            sequence.tokens.append(self.random.randrange(2))
        marks = self.marks(sequence)
        for group, tables in enumerate(self.real.block_tables([sequence.table])):
            for position in range(sequence.num_written, wanted):
                block = tables.block_ids[position // B]
                self.kv[group].setdefault(int(block), [0] * B)[position % B] = marks[position]
        sequence.num_written = max(wanted, sequence.num_written)

    def do_commit(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        least = sequence.naive.num_committed
        computed = self.random.choice(
            (sequence.num_written,) * 3 + (least, (least + sequence.num_written) // 2)
        )
        self.shadow.learn(sequence.namespace, sequence.tokens)
        self.real.commit(sequence.table, array("I", sequence.tokens), computed)
        self.naive.commit(sequence.naive, sequence.tokens, computed)

    def do_fork(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        if sequence.naive.num_copies:
            with pytest.raises(AssertionError, match="copies into"):
                self.real.fork(sequence.table)
            return
        table, naive = self.real.fork(sequence.table), self.naive.fork(sequence.naive)
        committed = naive.num_committed
        tokens = sequence.tokens[: committed + self.random.randrange(3)]
        self.sequences.append(Sequence(table, naive, sequence.namespace, tokens, committed))

    def do_release(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        self.sequences.remove(sequence)
        self.known.append(sequence.tokens)
        tables = self.real.block_tables([sequence.table])
        if sequence.naive.num_copies:
            ids = [[int(block) for block in table.block_ids] for table in tables]
            self.closing.append((sequence.naive, ids))
        self.real.release(sequence.table)
        self.naive.release(sequence.naive)

    def do_copies(self) -> None:
        if self.copies:
            real, naive = self.copies.pop(self.random.randrange(len(self.copies)))
            self.real.release_copies(real)
            self.naive.release_copies(naive)

    def do_evict(self) -> None:
        group, count = self.random.randrange(len(self.kv)), self.random.randrange(6)
        freed = self.real.evict(count, GroupId(group))
        assert freed == self.naive.groups[group].evict(count)  # invariant 8
        held = self.real.stats().groups[group]
        assert freed == count or held.num_evictable == 0

    def do_admit(self) -> None:
        """What ``can_admit`` promises is tried out on a copy of the naive cache."""
        tokens, namespace = self.prompt(), self.random.choice(self.roots)
        reserve, chunk = self.random.randrange(3), self.random.choice((None, 1, 16, 50))
        length = len(tokens) + self.random.randrange(40)
        match = self.real.peek_match(array("I", tokens), namespace)
        says = self.real.can_admit(match, length, reserve_blocks=reserve, chunk_tokens=chunk)
        if self.random.random() < 0.3:
            floored = self.real.floor_match(match)
            assert floored.num_tokens == match.num_tokens // B * B
            assert self.real.can_admit(floored, length) or not self.real.can_admit(match, length)
        trial, source = copy.deepcopy((self.naive, self.source(match)))
        table, fits = trial.open(tokens, namespace, source), True
        tokens = tokens + [9] * length
        while fits and table.num_committed < length:
            until = min(length, table.num_committed + (chunk or length))
            fits = trial.extend(table, until) is not None
            if fits:
                trial.commit(table, tokens, until)
        full = [group for group in trial.groups if group.window is None]
        fits = fits and all(g.num_empty + len(g.evictable) >= reserve for g in full)
        assert fits or not says
        assert says or not fits or len(full) < len(trial.groups)

    def do_wrong(self) -> None:
        """Wrong calls are loud and change nothing; ``compare`` looks."""
        sequence = self.pick()
        calls = [lambda: self.real.release(TableId(12345)), lambda: self.real.fork(TableId(0))]
        if sequence is not None:
            few, many = sequence.naive.num_committed - 1, sequence.num_written + 500
            tokens = array("I", [0] * (many + 1))
            calls.append(lambda: self.real.commit(sequence.table, tokens, many))
            calls.append(lambda: self.real.commit(sequence.table, tokens[:1], 2))
            if few >= 0:
                calls.append(lambda: self.real.commit(sequence.table, tokens, few))
        with pytest.raises(AssertionError):
            self.random.choice(calls)()

    # comparison

    def marks(self, sequence: Sequence) -> list[int]:
        """The KV of a position depends on the namespace and all tokens up to it."""
        marks = sequence.marks
        while len(marks) < len(sequence.tokens):
            before = marks[-1] if marks else int.from_bytes(sequence.namespace[:6], "little")
            marks.append(hash((before, sequence.tokens[len(marks)])))
        return marks

    def check_kv(self, sequence: Sequence) -> None:
        marks, committed = self.marks(sequence), sequence.naive.num_committed
        for group, tables in enumerate(self.real.block_tables([sequence.table])):
            for j, block in enumerate(tables.block_ids[: -(-committed // B)]):
                if block:
                    span = marks[j * B : min(committed, (j + 1) * B)]
                    assert self.kv[group][int(block)][: len(span)] == span, "a wrong block's KV"

    def compare_follower(self) -> None:
        """The index rebuilt from the bytes of events has the same blocks, tokens and parents."""
        batch = unpack(self.packer.pack(EventBatch(0.0, tuple(self.events))))
        self.events.clear()
        self.follower.window_groups |= batch.window_groups
        for event in batch.events:
            self.follower(event)
        assert self.follower.num_faults == 0
        for g, cached in enumerate(self.shadow.cached):
            group, size = GroupId(g), 8 if self.packer._int_hashes else 32
            told = self.follower.blocks(group)
            assert set(told) == {block_hash[-size:] for block_hash in cached}
            for block_hash, (_, prefix) in cached.items():
                assert told[block_hash[-size:]].token_ids == prefix[-B:]
                if self.shadow.has_parents[g]:
                    assert self.follower.prefix(group, block_hash[-size:]) == prefix

    def compare(self) -> None:
        self.compare_follower()
        self.real.check_integrity()
        for sequence in self.sequences:
            self.check_kv(sequence)
        stats = self.real.stats()
        assert stats.num_hash_mismatches == 0
        for g, naive in enumerate(self.naive.groups):
            counts = stats.groups[g]
            assert counts.num_empty == naive.num_empty
            assert counts.num_published == len(naive.published)
            assert set(self.shadow.cached[g].values()) == set(naive.published)
            assert self.shadow.removed[g] == naive.evicted_keys  # invariant 9: block for block
            self.compare_blocks(g, naive.evictable)

    def compare_blocks(self, g: int, naive_evictable: list[NaiveBlock]) -> None:
        """Real ids and naive blocks stand one to one."""
        real = list(evictable_blocks(self.real, GroupId(g)))
        naive: list[NaiveBlock | None] = list(naive_evictable)
        assert len(real) == len(naive)
        for sequence in self.sequences:
            real += [int(b) for b in self.real.block_tables([sequence.table])[g].block_ids]
            naive += sequence.naive.blocks[g]
        self.closing = [(table, ids) for table, ids in self.closing if table.num_copies]
        for table, ids in self.closing:
            real += ids[g]
            naive += table.blocks[g]
        for copies, twins in self.copies:
            real += [c.source for c in copies if c.group == g]
            naive += [source for group, source, _ in twins if group == g]
        if g == 0:
            self.naive_of = dict(zip(real, naive, strict=True))
        pairs = {(block, id(twin)) for block, twin in zip(real, naive, strict=True)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert all((a == 0) == (b == id(None)) for a, b in pairs)


@pytest.mark.parametrize("seed", fuzz_seeds(40))
def test_real_and_naive_agree(seed: int) -> None:
    Harness(seed).run(300)


def test_the_operations_reach_what_they_are_for() -> None:
    """Over a few fixed seeds: hits, partly matched blocks, evictions, copies, refusals."""
    runs = [Harness(seed) for seed in range(20)]
    for harness in runs:
        harness.run(200)
    stats = [harness.real.stats() for harness in runs]
    assert sum(one.num_hit_tokens > 0 for one in stats) >= 4
    assert sum(any(group.num_evicted for group in one.groups) for one in stats) >= 4
    assert sum(harness.num_copies > 0 for harness in runs) >= 3
    assert sum(harness.num_refused > 0 for harness in runs) >= 3
    assert sum(harness.num_partial > 0 for harness in runs) >= 3
