"""Each policy agrees with its naive twin, request by request, and none beats the clairvoyant."""

import random

import pytest

from model.naive_eviction import (
    NaiveArc,
    NaiveFifo,
    NaiveGdsf,
    NaiveLfu,
    NaivePolicy,
    NaiveS3Fifo,
    NaiveSieve,
    NaiveTailLru,
)
from model.naive_reuse_rank import NaiveReuseRank
from model.phase_cases import changing_traffic
from model.seeds import fuzz_seeds
from model.trace_cases import bound_hits, branching_case, real_hits
from pagemill._native import eviction_policies
from pagemill.core.layers import EVICTIONS

TWINS = {
    "lru": NaivePolicy,
    "lfu": NaiveLfu,
    "fifo": NaiveFifo,
    "sieve": NaiveSieve,
    "s3fifo": NaiveS3Fifo,
    "arc": NaiveArc,
    "gdsf": NaiveGdsf,
    "tlru": NaiveTailLru,
    "reuse_rank_plain": NaiveReuseRank,
    "reuse_rank": lambda capacity: NaiveReuseRank(capacity, has_net=True),
    "reuse_rank_strict": lambda capacity: NaiveReuseRank(capacity, has_net=True, is_strict=True),
}


def test_every_policy_has_a_twin() -> None:
    assert set(EVICTIONS) <= set(TWINS)
    assert set(eviction_policies()) - set(TWINS) == {"lhd"}  # for comparison, and it samples


@pytest.mark.parametrize("seed", fuzz_seeds(3))
@pytest.mark.parametrize("name", TWINS)
def test_a_policy_hits_what_its_twin_hits(name: str, seed: int) -> None:
    choose = random.Random(seed)
    case = branching_case(choose, 500)
    trace = case.trace()
    for capacity in (10, choose.randrange(14, 80), 150):
        twin = TWINS[name](capacity)
        hits = real_hits(trace, name, capacity)
        for i, row in enumerate(case.rows):
            want = twin.serve(row.time_s, tuple(row.ids), row.has_tool_calls)
            assert hits[i] == want, f"request {i}, {capacity} blocks"
        assert sum(max(0, hit) for hit in hits) <= bound_hits(trace, capacity)


@pytest.mark.parametrize("seed", fuzz_seeds(2))
@pytest.mark.parametrize("name", ("reuse_rank", "reuse_rank_strict", "reuse_rank_plain", "arc"))
def test_twins_agree_where_the_traffic_changes(name: str, seed: int) -> None:
    """Long against the pool, so that trust in ReuseRank grows and goes."""
    trace, twin = changing_traffic(seed, 40), TWINS[name](40)
    hits = real_hits(trace, name, 40)
    for i in range(trace.num_requests):
        path = tuple(int(block) for block in trace.ids(i))
        want = twin.serve(trace.times_ns[i] / 1e9, path, bool(trace.has_tool_calls[i]))
        assert hits[i] == want, f"request {i}"


@pytest.mark.parametrize("seed", fuzz_seeds(2))
def test_what_reuse_rank_learns_is_drawn_to_the_mean_by_tokens(seed: int) -> None:
    """n0 is 81,920 tokens whatever the block size."""
    case = branching_case(random.Random(seed), 400)
    twin = NaiveReuseRank(60, block_tokens=16)
    want = [twin.serve(row.time_s, tuple(row.ids), row.has_tool_calls) for row in case.rows]
    assert real_hits(case.trace(), "reuse_rank_plain", 60, block_tokens=16) == want


@pytest.mark.parametrize("seed", fuzz_seeds(2))
def test_the_bound_grows_with_the_cache(seed: int) -> None:
    trace = branching_case(random.Random(seed), 400).trace()
    bounds = [bound_hits(trace, size) for size in (14, 20, 40, 80, 10_000)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == sum(real_hits(trace, "lru", 10_000))
