"""A trace through the real cache: every index, policy and size, one cell each.

The rules of a replay:

Warm-up        the first 10 % of requests fill the cache and are not counted.
Concurrency    a request is over at once; only its own blocks are held while it runs. A real server
               holds those of all running requests, so its room for cached blocks is smaller.
Bursts         requests with equal times run in the order of the file, with no time between them.
Blocks         prompt blocks only: what a request generated is cached when a later prompt has it.
               All blocks of a request are admitted; one that is larger than the cache passes by
               and hits nothing.
Last token     a prompt of block ids may hit as a whole (its ids stand for blocks, the last one
               partly filled). A prompt of tokens never hits its last token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace

import numpy
from numpy.typing import NDArray

from pagemill._native import CacheCore, eviction_policies
from pagemill.bench.bound import (
    Intervals,
    bound_hit_tokens,
    bound_saved_work,
    use_intervals,
    without_larger,
    work_of,
)
from pagemill.bench.traces import Trace, block_view
from pagemill.bench.waste import shared_tokens
from pagemill.core.errors import ConfigError
from pagemill.core.layers import EVICTIONS

WARMUP_SHARE = 0.1
INDEXES = ("radix", "flat", "off")
DEFAULT_SIZES = ("1%", "2%", "5%", "10%", "20%")
NUM_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. Rates are shares of the counted prompts, 0 to 1; None: nothing to bound."""

    trace: str
    prefix_index: str
    eviction: str
    num_blocks: int
    block_size: int
    hit_rate: float
    saved_work: float
    bound: float | None
    bound_work: float | None
    hit_tokens: int
    prompt_tokens: int
    num_requests: int
    num_refused: int
    cpu_us_per_request: float

    def row(self) -> dict[str, str | int | float | None]:
        return asdict(self)


def choose(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """A list with commas, or ``all``. ConfigError names a word that is not known."""
    if text == "all":
        return tuple(known)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"{what} {name!r}: choose from {', '.join(known)}, or all")
    return names


def evictions(text: str) -> tuple[str, ...]:
    """Policies by name; ``all`` leaves out those that are there for comparison only."""
    return EVICTIONS if text == "all" else choose(text, eviction_policies(), "eviction")


def sizes(text: str, num_unique: int) -> tuple[int, ...]:
    """``1%,2%,50000``: percents of the trace's unique blocks (rounded down), or blocks."""
    found = []
    for word in text.split(","):
        word = word.strip()
        try:
            percent = word.endswith("%")
            count = int(float(word[:-1]) * num_unique / 100 + 1e-9) if percent else int(word)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"num-blocks {word!r}: write 2% or 50000") from error
        if not 1 <= count < 1 << 30:
            raise ConfigError(f"num-blocks {word!r} means {count} blocks: that is no cache")
        found.append(count)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one trace: for each size the share of hit tokens and of saved work at most."""

    hit_rate: dict[int, float]
    saved_work: dict[int, float]


def num_warmup(trace: Trace) -> int:
    return int(trace.num_requests * WARMUP_SHARE)


def hit_tokens(
    trace: Trace, prefix_index: str, eviction: str, num_blocks: int
) -> NDArray[numpy.int64]:
    """Of each request; -1 where it is larger than the cache. The real cache does the work."""
    core = CacheCore(
        [num_blocks + 1],
        [0],
        trace.block_tokens if trace.is_exact else 1,
        prefix_index != "off",
        prefix_index == "radix",
        False,
        eviction,
        trace.block_tokens,
    )
    hits = core.replay(
        trace.token_ids, trace.start, trace.times_ns, trace.has_tool_calls, not trace.is_exact
    ).astype(numpy.int64)
    if trace.is_exact:
        return hits
    whole = numpy.minimum(hits * trace.block_tokens, trace.prompt_tokens)
    return numpy.where(hits < 0, hits, whole)


def replay_cell(
    trace: Trace, prefix_index: str, eviction: str, num_blocks: int, bounds: Bounds | None = None
) -> Cell:
    begin = time.thread_time()
    try:
        hits = hit_tokens(trace, prefix_index, eviction, num_blocks)
    except MemoryError as error:
        raise ConfigError(
            f"num-blocks {num_blocks}: their index does not fit this machine's memory"
        ) from error
    cpu_s = time.thread_time() - begin
    counted = slice(num_warmup(trace), None)
    served = numpy.maximum(hits[counted], 0)
    prompts = trace.prompt_tokens[counted]
    return Cell(
        trace=trace.name,
        prefix_index=prefix_index,
        eviction=eviction,
        num_blocks=num_blocks,
        block_size=trace.block_tokens,
        hit_rate=float(served.sum() / prompts.sum()),
        saved_work=float(work_of(served).sum() / work_of(prompts).sum()),
        bound=bounds.hit_rate[num_blocks] if bounds else None,
        bound_work=bounds.saved_work[num_blocks] if bounds else None,
        hit_tokens=int(served.sum()),
        prompt_tokens=int(prompts.sum()),
        num_requests=len(prompts),
        num_refused=int((hits[counted] < 0).sum()),
        cpu_us_per_request=cpu_s / trace.num_requests * 1e6,
    )


def find_bounds(blocks: Trace, num_blocks: Sequence[int], *, with_work: bool = True) -> Bounds:
    """``blocks``: a trace of block ids."""
    first = num_warmup(blocks)
    prompts = blocks.prompt_tokens[first:]
    hits: dict[int, float] = {}
    works: dict[int, float] = {}
    every: Intervals | None = None
    for size in num_blocks:
        served = without_larger(blocks, size)
        hits[size] = float(bound_hit_tokens(served, size)[first:].sum() / prompts.sum())
        if with_work:
            if served is blocks:
                every = found = every or use_intervals(blocks, first)
            else:
                found = use_intervals(served, first)
            works[size] = bound_saved_work(found, size) / float(work_of(prompts).sum())
    return Bounds(hits, works)


def sweep(
    trace: Trace,
    prefix_indexes: Sequence[str],
    policies: Sequence[str],
    num_blocks: str,
    *,
    with_bound: bool = True,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cell]:
    """All cells, on both cores: the replay itself holds no interpreter lock."""
    blocks = block_view(trace)
    if not len(blocks.token_ids):
        raise ConfigError(
            f"{trace.name}: no prompt fills a block of {trace.block_tokens} tokens: give a smaller"
            " --block-size"
        )
    counts = sizes(num_blocks, int(blocks.token_ids.max()) + 1)
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        pending = [pool.submit(find_bounds, blocks, (size,)) for size in counts if with_bound]
        order = list(_cells(prefix_indexes, policies, counts))
        cells = {pool.submit(replay_cell, trace, *what): what for what in order}
        for done, _ in enumerate(as_completed(cells), 1):
            on_cell(done, len(cells))
        bounds = Bounds({}, {})
        for found in pending:
            bounds.hit_rate.update(found.result().hit_rate)
            bounds.saved_work.update(found.result().saved_work)
        results = {what: future.result() for future, what in cells.items()}
    part = find_part(trace) if with_bound and "radix" in prefix_indexes else Part()
    return [_bounded(results[what], bounds, part) for what in order]


def _cells(
    prefix_indexes: Sequence[str], policies: Sequence[str], counts: Sequence[int]
) -> Iterator[tuple[str, str, int]]:
    for index in prefix_indexes:
        for policy in policies if index != "off" else policies[:1]:
            for count in counts if index != "off" else counts[:1]:
                yield index, policy, count


def _bounded(cell: Cell, bounds: Bounds, part: "Part") -> Cell:
    """A token-exact index may hit a part of a block more than the clairvoyant's whole blocks."""
    hits = bounds.hit_rate.get(cell.num_blocks)
    work = bounds.saved_work.get(cell.num_blocks)
    if cell.prefix_index == "radix" and hits is not None and work is not None:
        hits = min(hits + part.hit_rate, part.most_hit_rate)
        work = min(work + part.saved_work, part.most_saved_work)
    return replace(cell, bound=hits, bound_work=work)


@dataclass(frozen=True, slots=True)
class Part:
    """Shares of the counted prompts: what parts of blocks can add, and what a cache without end
    hits."""

    hit_rate: float = 0.0
    saved_work: float = 0.0
    most_hit_rate: float = 1.0
    most_saved_work: float = 1.0


def find_part(trace: Trace) -> Part:
    """Nothing for a trace of block ids: its ids are whole."""
    if not trace.is_exact:
        return Part()
    first = num_warmup(trace)
    shared = shared_tokens(trace)[first:]
    before = numpy.maximum(shared - (trace.block_tokens - 1), 0)
    tokens = trace.prompt_tokens[first:].sum()
    work = work_of(trace.prompt_tokens[first:]).sum()
    return Part(
        float((shared - before).sum() / tokens),
        float((work_of(shared) - work_of(before)).sum() / work),
        float(shared.sum() / tokens),
        float(work_of(shared).sum() / work),
    )
