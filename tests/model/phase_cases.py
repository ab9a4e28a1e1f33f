"""Traffic that changes its ways: phases that reward one kind of cache and then the other.

Loops a bit larger than the pool, scans, popular paths, floods that come thrice at once and never
again, sessions, what was seen once and comes again soon, and what the phases before asked for.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count

from model.trace_cases import TraceCase
from pagemill.bench.traces import Trace

Path = tuple[int, ...]
Source = Iterator[Path]


class Phases:
    """Makes paths; ``pool``: blocks of the cache they are made against."""

    def __init__(self, seed: int, pool: int) -> None:
        self.choose, self.pool = random.Random(seed), pool
        self.fresh = count(1000)
        self.asked: list[Path] = []
        self.kinds: tuple[Callable[[], Source], ...] = (
            self.scan, self.loop, self.popular, self.flood, self.sessions, self.soon,
            self.again, self.mixed,
        )  # fmt: skip

    def new_path(self, most: int) -> Path:
        return (next(self.fresh), *range(self.choose.randint(1, most) - 1))

    def scan(self) -> Source:
        most = self.choose.choice((1, 4, 12))
        while True:
            yield self.new_path(most)

    def loop(self) -> Source:
        most, size = self.choose.choice((1, 4, 10)), self.choose.uniform(0.3, 1.8) * self.pool
        paths: list[Path] = []
        while sum(map(len, paths)) < size:
            paths.append(self.new_path(most))
        while True:
            if self.choose.random() < 0.2:
                self.choose.shuffle(paths)
            yield from paths

    def popular(self) -> Source:
        paths = [self.new_path(6) for _ in range(self.choose.randint(20, self.pool))]
        power = self.choose.uniform(0.6, 1.4)
        weights = [(k + 1) ** -power for k in range(len(paths))]
        while True:
            yield from self.choose.choices(paths, weights, k=64)

    def flood(self) -> Source:
        times, most = self.choose.randint(2, 5), self.choose.choice((2, 4, 9))
        while True:
            path = self.new_path(most)
            for _ in range(times):
                yield path

    def sessions(self) -> Source:
        open_now = [self.new_path(3) for _ in range(self.choose.randint(3, 60))]
        longest, grow = self.choose.randint(5, 30), self.choose.randint(1, 4)
        while True:
            at = self.choose.randrange(len(open_now))
            open_now[at] += tuple(self.choose.randrange(50) for _ in range(grow))
            if len(open_now[at]) > longest:
                open_now[at] = self.new_path(3)
            yield open_now[at]

    def soon(self) -> Source:
        """Each path comes twice: again after so many others."""
        most = self.choose.choice((1, 3, 8))
        after = max(1, int(self.choose.uniform(0.05, 0.95) * self.pool / (most + 1)))
        line: list[Path] = []
        while True:
            line.append(self.new_path(most))
            yield line[-1]
            if len(line) > after:
                yield line.pop(0)

    def again(self) -> Source:
        """What was asked for lately, in its order or at random."""
        lately = self.asked[-self.choose.randint(10, self.pool) :] or [self.new_path(4)]
        while True:
            if self.choose.random() < 0.3:
                self.choose.shuffle(lately)
            yield from lately

    def mixed(self) -> Source:
        first, second = (self.choose.choice(self.kinds[:-1])() for _ in range(2))
        share = self.choose.uniform(0.1, 0.9)
        while True:
            yield next(first if self.choose.random() < share else second)

    def phase(self, case: TraceCase, now_s: float, num_blocks: float) -> float:
        source, gap_s = self.choose.choice(self.kinds)(), self.choose.choice((0.02, 0.125, 0.5, 2))
        num_asked = 0
        while num_asked < num_blocks:
            path = next(source)
            now_s += gap_s
            case.add(now_s, path, has_tool_calls=len(path) % 2 == 0)
            num_asked += len(path)
            self.asked.append(path)
        del self.asked[: -2 * self.pool]
        return now_s


def changing_traffic(seed: int, pool: int, turnovers: float = 40) -> Trace:
    """Asks for about ``turnovers`` pools of blocks."""
    phases, case, now_s = Phases(seed, pool), TraceCase(), 0.0
    left = turnovers * pool
    while left > 0:
        num_blocks = min(left, phases.choose.choice((0.5, 1.5, 4, 12)) * pool)
        now_s = phases.phase(case, now_s, num_blocks)
        left -= num_blocks
    return case.trace()
