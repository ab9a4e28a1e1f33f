"""A replay is the real cache under stated rules; its bounds are bounds."""

import itertools
import json
import random
import sys
from array import array
from pathlib import Path

import numpy
import pytest

from model.seeds import fuzz_seeds
from model.trace_cases import TraceCase, branching_case
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.bench.bound import Intervals, bound_saved_work, use_intervals, work_of
from pagemill.bench.picture import check_picture, write_picture
from pagemill.bench.replay import evictions, find_bounds, hit_tokens, replay_cell, sizes, sweep
from pagemill.bench.replay_report import describe, write_json
from pagemill.bench.trace_formats.request import TraceRequest
from pagemill.bench.traces import make_trace
from pagemill.core.errors import ConfigError
from pagemill.core.layers import EVICTIONS


def test_sizes_and_policies_by_name() -> None:
    assert sizes("1%,2.5%,50000", 1000) == (10, 25, 50000)
    assert evictions("all") == EVICTIONS and evictions("arc,lru") == ("arc", "lru")
    for wrong in ("x%", "0", "0.01%", "1e5"):
        with pytest.raises(ConfigError, match="num-blocks"):
            sizes(wrong, 1000)
    with pytest.raises(ConfigError, match="choose from lru"):
        evictions("best")


def test_an_index_larger_than_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*what: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("pagemill.bench.replay.hit_tokens", refuse)
    with pytest.raises(ConfigError, match="num-blocks 7: their index"):
        replay_cell(branching_case(random.Random(1), 9).trace(), "flat", "lru", 7)


def test_the_first_tenth_is_not_counted_and_larger_requests_hit_nothing() -> None:
    case = TraceCase()
    for i in range(20):
        case.add(i, (1, 2) if i < 19 else (1, 2, 3, 4, 5))
    cell = replay_cell(case.trace(), "flat", "lru", 4)
    assert cell.num_requests == 18 and cell.num_refused == 1
    assert cell.hit_tokens == 17 * 1024 and cell.prompt_tokens == 17 * 1024 + 2560
    assert cell.hit_rate == pytest.approx(cell.hit_tokens / cell.prompt_tokens)
    served = numpy.array([1024] * 17)
    prompts = numpy.array([1024] * 17 + [2560])
    assert cell.saved_work == pytest.approx(work_of(served).sum() / work_of(prompts).sum())


def test_a_partly_filled_last_block_counts_its_tokens() -> None:
    rows = [TraceRequest(i, (0, 1), 700, 0) for i in range(3)]
    trace = make_trace("t", 512, False, rows)
    assert hit_tokens(trace, "flat", "lru", 10).tolist() == [0, 700, 700]


def test_tokens_are_replayed_as_the_manager_would() -> None:
    choose = random.Random(3)
    stem = [choose.randrange(50) for _ in range(90)]
    prompts = [stem[: choose.randrange(1, 90)] + [99] * choose.randrange(40) for _ in range(60)]
    trace = make_trace(
        "t", 16, True, [TraceRequest(i, p, len(p), 0) for i, p in enumerate(prompts)]
    )
    for index, name in itertools.product(("flat", "radix"), ("lru", "arc", "reuse_rank")):
        groups = (LayerGroup("full", (0,)),)
        cache = CacheManager(CacheConfig(groups, (13,), prefix_index=index, eviction=name))
        root, want = bytes(32), []
        for i, prompt in enumerate(prompts):
            tokens = array("I", prompt)
            cache.advance(i * 10**9)
            table = cache.open(cache.peek_match(tokens, root), root)
            want.append(cache.num_tokens_cached(table))
            copies = cache.extend(table, len(tokens))
            assert copies is not None
            cache.commit(table, tokens, len(tokens))
            cache.release_copies(copies)
            cache.release(table)
        assert hit_tokens(trace, index, name, 12).tolist() == want and sum(want) > 0


@pytest.mark.parametrize("seed", fuzz_seeds(2))
def test_nothing_beats_the_bounds(seed: int) -> None:
    trace = branching_case(random.Random(seed), 400).trace()
    for cell in sweep(trace, ("flat",), EVICTIONS, "15,40,100"):
        assert cell.bound is not None and cell.bound_work is not None
        assert cell.hit_rate <= cell.bound + 1e-9, cell
        assert cell.saved_work <= cell.bound_work + 1e-9, cell


def test_nothing_beats_the_bounds_to_the_token() -> None:
    choose = random.Random(6)
    stems = [[choose.randrange(9) for _ in range(150)] for _ in range(4)]
    prompts = [[*choose.choice(stems)[: choose.randrange(1, 150)], 77, i] for i in range(200)]
    rows = [TraceRequest(i, p, len(p), 0) for i, p in enumerate(prompts)]
    cells = sweep(
        make_trace("t", 16, True, rows), ("flat", "radix"), ("lru", "reuse_rank"), "11,40"
    )
    for cell in cells:
        assert cell.bound is not None and cell.bound_work is not None
        assert cell.hit_rate <= cell.bound + 1e-9 and cell.saved_work <= cell.bound_work + 1e-9
    assert cells[-1].hit_rate > cells[3].hit_rate  # radix, flat: of the same policy and size


def best_work(intervals: Intervals, num_blocks: int) -> float:
    """By trying every set of intervals."""
    best = 0.0
    for picked in itertools.product((False, True), repeat=len(intervals.work)):
        load = intervals.path_blocks.copy()
        for keep, first, last, number in zip(
            picked, intervals.first, intervals.last, intervals.num_blocks, strict=True
        ):
            load[first + 1 : last] += keep * number
        if (load <= num_blocks).all():
            best = max(best, float(intervals.work[numpy.array(picked)].sum()))
    return best


@pytest.mark.parametrize("seed", fuzz_seeds(4))
def test_the_bound_on_work_is_above_the_best_and_near_it(seed: int) -> None:
    choose = random.Random(seed)
    case = TraceCase()
    for i in range(14):
        case.add(i, tuple(choose.choice(((1,), (2,), (3, 1), (4,), (5,)))))
    intervals = use_intervals(case.trace(), 0)
    for num_blocks in (3, 4, 9):
        best, bound = best_work(intervals, num_blocks), bound_saved_work(intervals, num_blocks, 400)
        assert best <= bound + 1e-6
        assert bound <= 1.35 * best + 600
    assert bound == pytest.approx(best)  # nothing is scarce


def test_a_sweep_covers_every_cell_and_off_once(tmp_path: Path) -> None:
    trace = branching_case(random.Random(1), 120).trace()
    seen: list[tuple[int, int]] = []
    cells = sweep(
        trace, ("flat", "off"), ("lru", "arc"), "20,50", on_cell=lambda *at: seen.append(at)
    )
    assert [(c.prefix_index, c.eviction, c.num_blocks) for c in cells] == [
        ("flat", "lru", 20),
        ("flat", "lru", 50),
        ("flat", "arc", 20),
        ("flat", "arc", 50),
        ("off", "lru", 20),
    ]
    assert seen == [(i, 5) for i in range(1, 6)] and cells[-1].hit_rate == 0
    write_json(cells, tmp_path / "o.json", **describe(trace))
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert {
        "trace",
        "prefix_index",
        "eviction",
        "num_blocks",
        "hit_rate",
        "saved_work",
        "bound",
    } <= (rows[0].keys())
    write_picture(cells, tmp_path / "o.svg")
    picture = (tmp_path / "o.svg").read_text()
    assert "<svg" in picture and "<!-- arc -->" in picture and "<!-- bound -->" in picture
    write_picture(cells, tmp_path / "o.png")
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="svg"):
        write_picture(cells, tmp_path / "o.bmp")


def test_a_missing_library_is_named_before_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="plot"):
        check_picture(tmp_path / "o.svg")


def test_bounds_leave_out_requests_larger_than_the_cache() -> None:
    case = TraceCase()
    for i in range(20):
        case.add(i, (1, 2, 3) if i % 2 else (7,))
    bounds = find_bounds(case.trace(), (2, 30, 1))
    assert bounds.hit_rate[1] == bounds.hit_rate[2] < bounds.hit_rate[30]
    assert find_bounds(case.trace(), (30,)).saved_work[30] == bounds.saved_work[30]
    cell = replay_cell(case.trace(), "flat", "lru", 2)
    assert cell.hit_rate == pytest.approx(bounds.hit_rate[2])
    assert cell.saved_work == pytest.approx(bounds.saved_work[2])
