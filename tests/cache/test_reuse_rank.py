"""ReuseRank keeps what will be used again, and its net holds where it would be wrong."""

import random

import numpy
import pytest

from model.phase_cases import changing_traffic
from model.seeds import fuzz_seeds
from model.trace_cases import TraceCase, real_hits
from pagemill.bench.traces import Trace

Hits = numpy.ndarray


def hits_of(trace: Trace, name: str, num_blocks: int) -> Hits:
    return numpy.array(real_hits(trace, name, num_blocks))


def share(trace: Trace, hits: Hits) -> float:
    """Hit blocks in percent of asked blocks."""
    return 100 * float(hits.sum()) / len(trace.token_ids)


def worst_of_ten_turnovers(trace: Trace, hits: Hits, lru: Hits, num_blocks: int) -> float:
    """The lowest lead over LRU, in percent of asked blocks, over any ten turnovers of the pool; 0
    where the trace is shorter.

    A turnover is as many blocks computed, under LRU, as the pool has.
    """
    asked = numpy.diff(trace.start)
    lead, total, turnovers = (
        numpy.concatenate([[0], numpy.cumsum(counts)])
        for counts in (hits - lru, asked, (asked - lru) / num_blocks)
    )
    ends = numpy.searchsorted(turnovers, turnovers + 10)
    whole = ends < len(turnovers)
    first, last = numpy.flatnonzero(whole), ends[whole]
    worst = 100 * (lead[last] - lead[first]) / (total[last] - total[first])
    return float(worst.min(initial=0))


def worst_so_far(trace: Trace, hits: Hits, lru: Hits, num_blocks: int) -> float:
    """The lowest lead over LRU from the start to any moment, in percent of what was asked until
    then, or of ten pools where that is more."""
    asked = numpy.maximum(numpy.cumsum(numpy.diff(trace.start)), 10 * num_blocks)
    return float((100 * numpy.cumsum(hits - lru) / asked).min())


def one_system_prompt() -> Trace:
    """Sessions of three turns under one shared prompt of 12 blocks, and prompts that come once."""
    case, shared, now_s = TraceCase(), tuple(range(12)), 0.0
    for session in range(400):
        for turn in range(1, 4):
            now_s += 0.25
            turns = tuple(1000 * session + i for i in range(2 * turn))
            case.add(now_s, (*shared, 100 + session, *turns))
        now_s += 0.25
        case.add(now_s, (*shared, 10_000_000 + session, *range(20)))
    return case.trace()


def turned_against_it(rounds: int = 3) -> Trace:
    """First a set of paths comes round and round. Then it is dead, and what is used three times at
    once never comes again, while what was used once comes again soon."""
    case, now_s, fresh = TraceCase(), 0.0, 10**6
    for part in range(rounds):
        for k in range(1200):
            now_s += 0.125
            fresh += 1
            case.add(now_s, (1000 * part + k % 20, 1, 2, 3) if k % 3 else (fresh,))
        soon: list[int] = []
        for _ in range(70):
            fresh += 1
            for _ in range(3):
                case.add(now_s, (fresh, 1, 2, 3))
            for _ in range(4):
                now_s += 0.5
                fresh += 1
                case.add(now_s, (fresh,))
                soon.append(fresh)
                if len(soon) > 5:
                    now_s += 0.5
                    case.add(now_s, (soon[-6],))
    return case.trace()


@pytest.mark.parametrize("num_blocks", (60, 150, 400))
def test_under_one_system_prompt_it_is_no_worse_than_lru(num_blocks: int) -> None:
    trace = one_system_prompt()
    lru, ours = (hits_of(trace, name, num_blocks) for name in ("lru", "reuse_rank"))
    assert share(trace, ours) >= share(trace, lru) - 0.05
    assert (ours[400:] >= 12).all(), "the shared prompt was evicted"


def test_the_net_holds_where_plain_reuse_rank_loses() -> None:
    trace, num_blocks = turned_against_it(), 60
    lru, plain, ours = (
        hits_of(trace, name, num_blocks) for name in ("lru", "reuse_rank_plain", "reuse_rank")
    )
    assert share(trace, plain) < share(trace, lru) - 5
    assert share(trace, ours) >= share(trace, lru) - 0.5
    assert worst_of_ten_turnovers(trace, ours, lru, num_blocks) >= -1
    assert worst_of_ten_turnovers(trace, plain, lru, num_blocks) < -5


@pytest.mark.parametrize("seed", fuzz_seeds(24))
def test_whatever_the_traffic_turns_to(seed: int) -> None:
    """What is proved in docs/eviction.md; one block for rounding."""
    pool = random.Random(seed).choice((300, 400, 700))
    trace = changing_traffic(seed, pool)
    lru, ours, strict = (
        hits_of(trace, n, pool) for n in ("lru", "reuse_rank", "reuse_rank_strict")
    )
    rounding = 100 / (10 * pool)
    assert worst_of_ten_turnovers(trace, strict, lru, pool) >= -1 - rounding
    assert worst_so_far(trace, strict, lru, pool) >= -1 - rounding
    assert worst_so_far(trace, ours, lru, pool) >= -1 - rounding


def test_few_ten_turnovers_lose_more_where_it_is_trusted() -> None:
    """Not proved but measured: 5 of 282 such cases lost more than 1 %, 2.3 at worst; all gained 1.6
    in the mean."""
    seeds, pool = fuzz_seeds(30), 300
    worst, gains = [], []
    for seed in seeds:
        trace = changing_traffic(seed, pool)
        lru, ours = (hits_of(trace, name, pool) for name in ("lru", "reuse_rank"))
        worst.append(worst_of_ten_turnovers(trace, ours, lru, pool))
        gains.append(share(trace, ours) - share(trace, lru))
    assert sum(lost < -1.05 for lost in worst) <= max(4, 0.1 * len(seeds)), f"seeds {seeds}"
    assert numpy.mean(gains) > 0, f"seeds {seeds}"


def test_the_net_lets_it_win() -> None:
    """Prompts that come once, and a set that comes round more slowly than LRU can keep."""
    case, now_s = TraceCase(), 0.0
    for k in range(3000):
        now_s += 0.5
        case.add(now_s, (k // 2 % 60, 1) if k % 2 else (10**6 + k, 1))
    trace = case.trace()
    assert share(trace, hits_of(trace, "lru", 160)) < 1
    assert share(trace, hits_of(trace, "reuse_rank", 160)) > 25
