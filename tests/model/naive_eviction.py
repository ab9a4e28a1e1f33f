"""Each eviction policy in plain Python, on a cache that is a dict. The compiled ones must agree.

A path is a tuple of ids, one a block; an id stands for its whole prefix, so its parent is fixed. A
request is over at once: it hits its longest cached prefix, admits the rest, and holds its path
while blocks go. Only leaves off the path go.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

Path = tuple[int, ...]


@dataclass(eq=False)
class Leaf:
    """What a policy may know of a cached block."""

    parent: int | None
    position: int
    published: int
    released: int = 0
    num_uses: int = 1
    bit: int = 0
    value: float = 0.0
    is_main: bool = False
    num_children: int = 0


@dataclass
class NaivePolicy:
    """LRU; the others change what they must."""

    capacity: int
    block_tokens: int = 512
    blocks: dict[int, Leaf] = field(default_factory=dict)
    clock: int = 0
    num_hits: int = 0  # of the request that is served

    def serve(self, now_s: float, path: Path, has_tool_calls: bool = False) -> int:
        """Hit blocks, or -1 where the path is larger than the cache."""
        self.advance(now_s)
        hits = next((i for i, b in enumerate(path) if b not in self.blocks), len(path))
        self.num_hits = hits
        for block in path[:hits]:
            self.touched(block)
        fits = len(path) <= self.capacity
        if fits:
            while len(self.blocks) + len(path) - hits > self.capacity:
                self.evict(set(path))
            for i in range(hits, len(path)):
                self.clock += 1
                parent = path[i - 1] if i else None
                self.blocks[path[i]] = Leaf(parent, i, self.clock, self.clock)
                if parent is not None:
                    self.blocks[parent].num_children += 1
                self.published(path[i])
        held = path if fits else path[:hits]
        self.ended(held, has_tool_calls)
        for block in reversed(held):
            self.clock += 1
            self.blocks[block].released = self.clock
        return hits if fits else -1

    def evict(self, held: set[int]) -> None:
        leaves = [b for b, leaf in self.blocks.items() if not leaf.num_children and b not in held]
        victim = self.choose(leaves)
        self.dropped(victim)
        leaf = self.blocks.pop(victim)
        if leaf.parent is not None:
            self.blocks[leaf.parent].num_children -= 1

    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda b: (self.rank(self.blocks[b]), self.blocks[b].released))

    def rank(self, leaf: Leaf) -> float:
        return 0.0

    def advance(self, now_s: float) -> None: ...
    def published(self, block: int) -> None: ...
    def touched(self, block: int) -> None:
        self.blocks[block].num_uses += 1

    def dropped(self, block: int) -> None: ...
    def ended(self, path: Path, has_tool_calls: bool) -> None: ...


class NaiveLfu(NaivePolicy):
    def rank(self, leaf: Leaf) -> float:
        return leaf.num_uses


class NaiveTailLru(NaivePolicy):
    def ended(self, path: Path, has_tool_calls: bool) -> None:
        for block in path:
            self.blocks[block].value = len(path)

    def rank(self, leaf: Leaf) -> float:
        needed = leaf.value * self.block_tokens + 512 - 2048
        return float((leaf.position + 1) * self.block_tokens <= needed)


class NaiveFifo(NaivePolicy):
    def rank(self, leaf: Leaf) -> float:
        return leaf.published


@dataclass
class NaiveGdsf(NaivePolicy):
    age: float = 0.0

    def _value(self, block: int) -> None:
        leaf = self.blocks[block]
        cost = 1 + leaf.position * self.block_tokens / 30000
        leaf.value = self.age + leaf.num_uses * cost

    def published(self, block: int) -> None:
        self._value(block)

    def touched(self, block: int) -> None:
        super().touched(block)
        self._value(block)

    def rank(self, leaf: Leaf) -> float:
        return leaf.value

    def dropped(self, block: int) -> None:
        self.age = max(self.age, self.blocks[block].value)


@dataclass
class NaiveSieve(NaivePolicy):
    hand: int = 0

    def touched(self, block: int) -> None:
        self.blocks[block].bit = 1

    def choose(self, leaves: list[int]) -> int:
        line = sorted(leaves, key=lambda b: self.blocks[b].published)
        line = [b for b in line if self.blocks[b].published >= self.hand] + [
            b for b in line if self.blocks[b].published < self.hand
        ]
        for block in [*line, *line]:
            if not self.blocks[block].bit:
                self.hand = self.blocks[block].published
                return block
            self.blocks[block].bit = 0
        raise AssertionError("the first round clears all bits")


@dataclass
class NaiveS3Fifo(NaivePolicy):
    ghosts: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def small_size(self) -> int:
        return max(1, (self.capacity + 1) // 10)

    def published(self, block: int) -> None:
        leaf = self.blocks[block]
        leaf.is_main = block in self.ghosts
        leaf.num_uses = 0
        self.ghosts.pop(block, None)

    def touched(self, block: int) -> None:
        self.blocks[block].num_uses = min(3, self.blocks[block].num_uses + 1)

    def choose(self, leaves: list[int]) -> int:
        while True:
            queues: list[list[int]] = [[], []]
            for b in sorted(leaves, key=lambda b: self.blocks[b].published):
                queues[self.blocks[b].is_main].append(b)
            num_small = sum(not leaf.is_main for leaf in self.blocks.values())
            from_main = num_small <= self.small_size or not queues[0]
            queue = queues[from_main] or queues[not from_main]
            leaf = self.blocks[queue[0]]
            if not leaf.num_uses:
                return queue[0]
            leaf.num_uses = leaf.num_uses - 1 if leaf.is_main else 0
            leaf.is_main = True
            self.clock += 1
            leaf.published = self.clock

    def dropped(self, block: int) -> None:
        if self.blocks[block].is_main:
            return
        self.ghosts[block] = None
        while len(self.ghosts) > self.capacity + 1 - self.small_size:
            self.ghosts.popitem(last=False)


@dataclass
class NaiveArc(NaivePolicy):
    ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )
    target: float = 0.0

    def _count(self, is_main: bool) -> int:
        return sum(leaf.is_main == is_main for leaf in self.blocks.values())

    def published(self, block: int) -> None:
        for side in (0, 1):
            if block in self.ghosts[side]:
                step = max(1.0, len(self.ghosts[1 - side]) / len(self.ghosts[side]))
                moved = self.target - step if side else self.target + step
                self.target = min(max(moved, 0.0), float(self.capacity))
                del self.ghosts[side][block]
                self.blocks[block].is_main = True
                break
        self._trim()

    def touched(self, block: int) -> None:
        self.blocks[block].is_main = True

    def choose(self, leaves: list[int]) -> int:
        side = self._count(False) <= self.target
        ours = [b for b in leaves if self.blocks[b].is_main == side] or leaves
        return min(ours, key=lambda b: self.blocks[b].released)

    def dropped(self, block: int) -> None:
        self.ghosts[self.blocks[block].is_main][block] = None
        self._trim(without=block)

    def _trim(self, without: int | None = None) -> None:
        once, again = self.ghosts
        gone = self.blocks[without].is_main if without is not None else None
        num_once = self._count(False) - (gone is False)
        num_all = len(self.blocks) - (gone is not None)
        while once and num_once + len(once) > self.capacity:
            once.popitem(last=False)
        while again and num_all + len(once) + len(again) > 2 * self.capacity:
            again.popitem(last=False)
