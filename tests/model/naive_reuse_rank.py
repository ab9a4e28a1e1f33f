"""ReuseRank in plain Python: everything computed anew.

Records are a list, exposures are counted by walking all of it, ranks by the formula. With the net,
the two shadow caches are whole ``NaivePolicy`` caches that see every request.
"""

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
            while record.num_crossed < NUM_BUCKETS and self.now_s - record.time_s >= lower_edge(
                record.num_crossed
            ):
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
                at = (node.block_class, bucket_of(self.now_s - node.record.time_s))
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
        bucket = bucket_of(self.now_s - node.record.time_s)
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
    """Which shadow to follow, from the lead of the second one, block by block."""

    is_following: bool = False
    asked: float = 0.0
    missed: float = 0.0
    leads: list[int] = field(default_factory=lambda: [0])  # since the switch
    num_switches: int = 0

    def add(self, capacity: int, asked: int, in_lru: int, in_shadow: int) -> None:
        keep = math.exp(-(asked - in_lru) / (2.0 * capacity))
        self.asked = self.asked * keep + asked
        self.missed = self.missed * keep + (asked - in_lru)
        self.leads.append(self.leads[-1] + in_shadow - in_lru)
        extreme = max(self.leads) if self.is_following else min(self.leads)
        since = len(self.leads) - 1 - self.leads[::-1].index(extreme)
        steps = zip(self.leads[since:], self.leads[since + 1 :], strict=False)
        num_losses = sum(after < before for before, after in steps)
        in_turnover = self.asked / max(self.missed, 1.0) * capacity
        moved = abs(self.leads[-1] - extreme) / in_turnover
        if moved > 0.04 and num_losses >= 2 if self.is_following else moved > 0.01:
            self.is_following = not self.is_following
            self.num_switches += 1
            self.leads = self.leads[-1:]


@dataclass
class NaiveReuseRank(NaivePolicy):
    has_net: bool = False
    net: "NaiveNet" = field(default_factory=lambda: NaiveNet())
    evicted: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.model = Model(self.block_tokens)
        self.lru = NaiveShadow(self.capacity)
        self.shadow = NaiveShadow(self.capacity, model=self.model)

    def advance(self, now_s: float) -> None:
        self.model.advance(now_s)

    def published(self, block: int) -> None:
        self.evicted.pop(block, None)

    def choose(self, leaves: list[int]) -> int:
        if self.has_net and not self.net.is_following:
            return min(leaves, key=lambda b: self.blocks[b].released)
        return min(leaves, key=self.model.order)

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
        self.net.add(self.capacity, len(path), in_lru, before)
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
