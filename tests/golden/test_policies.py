"""Hit counts on a real trace, to the token: a cut that comes with the source, and the whole hour.

The whole trace and the agents' sessions are read from $PAGEMILL_DATA or ../shared/data; without
them those tests are skipped.
"""

import os
from collections import OrderedDict
from pathlib import Path

import pytest

from pagemill.bench.replay import hit_tokens, num_warmup, replay_cell, sizes
from pagemill.bench.traces import Trace, load_trace
from pagemill.core.layers import EVICTIONS

TESTS = Path(__file__).parents[1]
DATA = Path(os.environ.get("PAGEMILL_DATA", TESTS.parents[1] / "shared" / "data"))
WHOLE = DATA / "traces" / "mooncake_conversation.jsonl.gz"
CUT_HITS = {
    "lru": (460800, 487936, 1093984),
    "lfu": (460800, 500736, 1154008),
    "fifo": (460800, 487936, 1085280),
    "sieve": (460800, 530944, 1221632),
    "s3fifo": (460800, 562808, 1330092),
    "arc": (460800, 500736, 1153496),
    "gdsf": (460800, 460800, 1235318),
    "reuse_rank": (460800, 483840, 1165664),  # an hour's twelfth: its net trusts it later
    "reuse_rank_strict": (460800, 483840, 1184096),
}
LRU = (5.53, 8.25, 20.25, 29.17, 36.74)
REUSE_RANK = (11.3, 15.5, 23.0, 30.1)

needs_whole = pytest.mark.skipif(not WHOLE.is_file(), reason=f"{WHOLE} is not there")


@pytest.fixture(scope="module")
def cut() -> Trace:
    return load_trace(TESTS / "data" / "mooncake_conversation_1000.jsonl.gz")


@pytest.fixture(scope="module")
def whole() -> Trace:
    return load_trace(WHOLE)


def reference_lru(trace: Trace, capacity: int) -> int:
    """Hit tokens after the warm-up; knows nothing of the cache under test."""
    order: OrderedDict[int, None] = OrderedDict()
    total = 0
    for i in range(trace.num_requests):
        ids = [int(block) for block in trace.ids(i)]
        found = next((j for j, block in enumerate(ids) if block not in order), len(ids))
        if i >= num_warmup(trace):
            total += min(found * 512, int(trace.prompt_tokens[i]))
        for block in ids:
            order.pop(block, None)
        while len(order) + len(ids) > capacity:
            order.popitem(last=False)
        order.update(dict.fromkeys(reversed(ids)))
    return total


@pytest.mark.parametrize("name", EVICTIONS)
def test_the_cut_hits_exactly_what_it_did(cut: Trace, name: str) -> None:
    counts = sizes("2%,5%,20%", int(cut.token_ids.max()) + 1)
    hits = tuple(replay_cell(cut, "flat", name, count).hit_tokens for count in counts)
    assert hits == CUT_HITS[name]


def test_lru_is_the_reference_on_the_cut(cut: Trace) -> None:
    for count in sizes("2%,3%,5%,20%,60%", int(cut.token_ids.max()) + 1):
        assert replay_cell(cut, "flat", "lru", count).hit_tokens == reference_lru(cut, count)


def test_no_index_no_hits(cut: Trace) -> None:
    assert not hit_tokens(cut, "off", "lru", 500).any()


@needs_whole
def test_lru_on_the_whole_hour(whole: Trace) -> None:
    counts = sizes("1%,2%,5%,10%,20%", int(whole.token_ids.max()) + 1)
    rates = [100 * replay_cell(whole, "flat", "lru", count).hit_rate for count in counts]
    assert [round(rate, 2) for rate in rates] == list(LRU)


@needs_whole
@pytest.mark.parametrize("name", ("reuse_rank", "reuse_rank_plain"))
def test_reuse_rank_on_the_whole_hour(whole: Trace, name: str) -> None:
    counts = sizes("1%,2%,5%,10%,20%", int(whole.token_ids.max()) + 1)
    rates = [100 * replay_cell(whole, "flat", name, count).hit_rate for count in counts]
    for rate, want, lru in zip(rates, (*REUSE_RANK, 36.7), LRU, strict=True):
        assert abs(rate - want) <= 0.7
        assert rate >= lru - 1
