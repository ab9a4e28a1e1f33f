"""ReuseRank in plain Python: everything computed anew.

Records are a list, exposures are counted by walking all of it, ranks by the formula. With the net,
the two shadow caches are whole ``NaivePolicy`` caches that see every request, and what is lacked is
counted at each choice.
"""

import bisect
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from model.naive_eviction import NaivePolicy, Path

NUM_BUCKETS = 20
PRIOR_TOKENS = 81920


def step(count: int) -> int:
    return next(i for i, most in enumerate((1, 2, 4, 8, math.inf)) if count <= most)


def lower_edge(bucket: int) -> float:
    return 0.0 if bucket == 0 else 0.5 * 2 ** (bucket - 1)


def bucket_of(age_s: float) -> int:
    """Ages are rounded to microseconds where they are made: the compiled policy counts whole
    nanoseconds, and a difference of floats falls beside the edge of a bucket."""
    return max(b for b in range(NUM_BUCKETS) if age_s >= lower_edge(b))


Class = tuple[int, int, bool]  # steps of uses and turns, tool calls


@dataclass(eq=False)
class Record:
    time_s: float
    unused: dict[Class, int] = field(default_factory=dict)
    num_crossed: int = 1  # lower edges; the first at its birth


@dataclass(eq=False)
class Known:
    """What is remembered of a block, cached or not."""

    num_uses: int = 0
    record: Record | None = None
    order: int = 0
    block_class: Class = (0, 0, False)
    ends_request: bool = False


@dataclass
class Model:
    block_tokens: int
    records: list[Record] = field(default_factory=list)
    reuse: dict[tuple[Class, int], int] = field(default_factory=dict)
    exposure: dict[tuple[Class, int], int] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    ranks: dict[Class, list[float]] = field(default_factory=dict)
    other_ranks: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    now_s: float = 0.0
    num_requests: int = 0
    next_ranking: int = 1

    def advance(self, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        for record in self.records:
            while record.num_crossed < NUM_BUCKETS and round(
                self.now_s - record.time_s, 6
            ) >= lower_edge(record.num_crossed):
                for kind, count in record.unused.items():
                    at = (kind, record.num_crossed)
                    self.exposure[at] = self.exposure.get(at, 0) + count
                record.num_crossed += 1

    def learn(self, path: Path, has_tool_calls: bool) -> None:
        if not path:
            return
        nodes = [self.known.setdefault(block, Known()) for block in path]
        nodes[-1].ends_request = True
        turns = sum(node.ends_request for node in nodes)
        record = Record(self.now_s)
        self.records.append(record)
        for node in nodes:
            if node.record is not None:
                node.record.unused[node.block_class] -= 1
                at = (node.block_class, bucket_of(round(self.now_s - node.record.time_s, 6)))
                self.reuse[at] = self.reuse.get(at, 0) + 1
            node.num_uses += 1
            node.block_class = (step(node.num_uses), step(turns), has_tool_calls)
            node.record, node.order = record, len(self.records)
            record.unused[node.block_class] = record.unused.get(node.block_class, 0) + 1
            at = (node.block_class, 0)
            self.exposure[at] = self.exposure.get(at, 0) + 1
        self.num_requests += 1
        if self.num_requests >= self.next_ranking:
            self.next_ranking = self.num_requests + min(max(self.num_requests // 50, 8), 256)
            self._rank()

    def _rank(self) -> None:
        kinds = sorted({kind for kind, _ in self.exposure})
        every = []
        for b in range(NUM_BUCKETS):
            reuse = sum(self.reuse.get((kind, b), 0) for kind in kinds)
            exposure = sum(self.exposure.get((kind, b), 0) for kind in kinds)
            every.append(reuse / exposure if exposure else 0.0)
        self.other_ranks = self._rates(every)
        prior = PRIOR_TOKENS / self.block_tokens
        self.ranks = {}
        for kind in kinds:
            hazard = []
            for b in range(NUM_BUCKETS):
                reuse, exposure = self.reuse.get((kind, b), 0), self.exposure.get((kind, b), 0)
                drawn = (reuse + prior * every[b]) / (exposure + prior)
                hazard.append(drawn if exposure else every[b])
            self.ranks[kind] = self._rates(hazard)

    def _rates(self, hazard: list[float]) -> list[float]:
        for _ in range(2):
            near = [hazard[0], *hazard, hazard[-1]]
            hazard = [(near[b] + 2 * near[b + 1] + near[b + 2]) / 4 for b in range(NUM_BUCKETS)]
        rates = []
        for first in range(NUM_BUCKETS):
            alive, seconds, best = 1.0, 0.0, 0.0
            for end in range(first, NUM_BUCKETS):
                width = lower_edge(end + 1) - lower_edge(end)
                seconds += alive * width * (1 - hazard[end] / 2)
                alive *= 1 - hazard[end]
                best = max(best, (1 - alive) / seconds)
            rates.append(best)
        return rates

    def order(self, block: int) -> tuple[float, int, int]:
        node = self.known[block]
        assert node.record is not None
        bucket = bucket_of(round(self.now_s - node.record.time_s, 6))
        rank = self.ranks.get(node.block_class, self.other_ranks)[bucket]
        return rank, -bucket, node.order


@dataclass
class NaiveShadow(NaivePolicy):
    """A shadow cache: LRU, or by the ranks of the model, which learns from outside."""

    model: Model | None = None
    gone: list[int] = field(default_factory=list)

    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=self.model.order) if self.model else super().choose(leaves)

    def dropped(self, block: int) -> None:
        self.gone.append(block)


@dataclass
class NaiveNet:
    """How many blocks that LRU holds the pool may lack; leads are walked from their beginning."""

    capacity: int
    is_strict: bool = False
    asked: int = 0
    turnovers: list[float] = field(default_factory=lambda: [0.0])
    pool: list[int] = field(default_factory=lambda: [0])
    shadow: list[int] = field(default_factory=lambda: [0])
    setback: int = 0  # at which of them

    def add(self, asked: int, in_lru: int, in_shadow: int, hits: int) -> None:
        self.asked += asked
        self.turnovers.append(self.turnovers[-1] + (asked - in_lru) / self.capacity)
        self.pool.append(self.pool[-1] + hits - in_lru)
        self.shadow.append(self.shadow[-1] + in_shadow - in_lru)
        if max(self._fall(self.pool), self._fall(self.shadow)) > self._slack():
            self.setback = len(self.pool) - 1

    def may_lack(self, num_blocks: int) -> bool:
        ever = self.pool[-1] + max(0.01 * self.asked, self._slack())
        return num_blocks <= min(ever, self._slack() * self._trust() - self._fall(self.pool))

    def _slack(self) -> float:
        return 0.01 * 10 * self.capacity

    def _fall(self, lead: list[int]) -> int:
        since = bisect.bisect_left(self.turnovers, self.turnovers[-1] - 10)
        return max(lead[since:]) - lead[-1]

    def _trust(self) -> float:
        turnovers = self.turnovers[-1] - self.turnovers[self.setback]
        gain = self.shadow[-1] - self.shadow[self.setback]
        if self.is_strict or gain < 0.02 * self.capacity * turnovers:
            return 1
        return 1 + (turnovers / 5.5) * (turnovers / 5.5)


@dataclass
class NaiveReuseRank(NaivePolicy):
    has_net: bool = False
    is_strict: bool = False
    evicted: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.model = Model(self.block_tokens)
        self.lru = NaiveShadow(self.capacity)
        self.shadow = NaiveShadow(self.capacity, model=self.model)
        self.net = NaiveNet(self.capacity, self.is_strict)

    def advance(self, now_s: float) -> None:
        self.model.advance(now_s)

    def published(self, block: int) -> None:
        self.evicted.pop(block, None)

    def choose(self, leaves: list[int]) -> int:
        best = min(leaves, key=self.model.order)
        num_lacking = sum(block not in self.blocks for block in self.lru.blocks)
        if not self.has_net or best not in self.lru.blocks or self.net.may_lack(num_lacking + 1):
            return best
        extra = [block for block in leaves if block not in self.lru.blocks]
        if extra:
            return min(extra, key=self.model.order)
        return min(leaves, key=lambda b: self.blocks[b].released)

    def dropped(self, block: int) -> None:
        self._remember(block)

    def _remember(self, block: int) -> None:
        self.evicted.pop(block, None)
        self.evicted[block] = None
        while len(self.evicted) > 4 * self.capacity:
            oldest, _ = self.evicted.popitem(last=False)
            held = (self.lru.blocks, self.shadow.blocks) if self.has_net else ()
            if not any(oldest in blocks for blocks in (self.blocks, *held)):
                del self.model.known[oldest]

    def ended(self, path: Path, has_tool_calls: bool) -> None:
        if not path:
            return
        if not self.has_net:
            self.model.learn(path, has_tool_calls)
            return
        in_lru = self.lru.serve(0, path)
        before = next((i for i, b in enumerate(path) if b not in self.shadow.blocks), len(path))
        self.net.add(len(path), in_lru, before, self.num_hits)
        self.model.learn(path, has_tool_calls)
        for block in self.lru.gone:
            if block not in self.blocks and block not in self.shadow.blocks:
                self._remember(block)
        self.shadow.serve(0, path)
        for block in self.shadow.gone:
            if block not in self.blocks:
                self._remember(block)
        self.lru.gone.clear()
        self.shadow.gone.clear()
