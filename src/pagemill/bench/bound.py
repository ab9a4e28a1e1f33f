"""What no policy can beat: the clairvoyant's hits, and an upper bound on saved prefill work.

Hits. Belady's MIN on blocks, every request admitted as a whole and its blocks held while it runs
(``_native.clairvoyant_hits``). It is the most hit *blocks*; in tokens it is the bound wherever
blocks are full. A partly filled last block weighs less, which MIN does not see.

Work. Keeping a block from one use to the next is an interval; it saves the work of that block; at
each request between, the kept intervals must fit beside the running request:

    maximise  sum of work[i] x[i]     0 <= x[i] <= 1
    where     sum of x[i] over intervals that cover request t  <=  blocks - path[t]     for all t

That is a min-cost flow. Its dual, a price a request, gives an upper bound for any prices that are
not negative: it is not solved to the end, the prices are improved for a fixed number of rounds, and
the lowest value is reported. So the figure is a true bound, and may lie above the optimum.
"""

from dataclasses import dataclass, replace

import numpy
from numpy.typing import NDArray

from pagemill import _native
from pagemill.bench.traces import Trace

EQUAL_TOKENS = 30_000
"""Attention costs as much as the linear layers at this position, in a model of 8 billion with
grouped queries: the work of token p is 1 + p / 30,000."""
NUM_ROUNDS = 80
RUN_TOKENS = 512
"""Blocks of one prompt that stand side by side and have the same two uses are one interval."""

Floats = NDArray[numpy.float64]


def work_of(tokens: NDArray[numpy.int64]) -> Floats:
    """Prefill work of the first ``tokens`` tokens of a prompt, in units of a first token's."""
    exact = tokens.astype(numpy.float64)
    return exact + exact * exact / (2 * EQUAL_TOKENS)


def without_larger(trace: Trace, num_blocks: int) -> Trace:
    """Requests of more than ``num_blocks`` blocks pass the cache by: they come without ids."""
    lengths = numpy.diff(trace.start)
    fits = lengths <= num_blocks
    if fits.all():
        return trace
    start = numpy.concatenate([[0], numpy.cumsum(numpy.where(fits, lengths, 0))])
    ids = trace.token_ids[numpy.repeat(fits, lengths)]
    return replace(trace, token_ids=ids, start=start.astype(numpy.int64))


def bound_hit_tokens(trace: Trace, num_blocks: int) -> NDArray[numpy.int64]:
    """Hit tokens of each request; ``trace`` is one of block ids."""
    blocks = _native.clairvoyant_hits(
        trace.token_ids, trace.start, trace.times_ns, trace.has_tool_calls, num_blocks
    )
    return numpy.minimum(blocks.astype(numpy.int64) * trace.block_tokens, trace.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Runs of blocks, each from the use at request ``first`` to the next use at ``last``.

    ``work`` is what a run saves as a whole, ``least`` and ``most`` what one of its blocks does.
    """

    first: NDArray[numpy.int32]
    last: NDArray[numpy.int32]
    num_blocks: NDArray[numpy.int32]
    work: Floats
    least: Floats
    most: Floats
    path_blocks: NDArray[numpy.int64]


def use_intervals(trace: Trace, num_warmup: int) -> Intervals:
    """All that end at a counted request, in runs of at most 512 tokens."""
    first, last, position, count = _native.use_intervals(
        trace.token_ids,
        trace.start,
        trace.times_ns,
        trace.has_tool_calls,
        num_warmup,
        max(1, RUN_TOKENS // trace.block_tokens),
    )
    size = trace.block_tokens
    prompt = trace.prompt_tokens[last]
    begin = position.astype(numpy.int64) * size
    end = numpy.minimum(begin + count.astype(numpy.int64) * size, prompt)
    head, tail = numpy.minimum(begin + size, prompt), numpy.maximum(end - size, begin)
    return Intervals(
        first,
        last,
        count,
        work_of(end) - work_of(begin),
        work_of(head) - work_of(begin),
        work_of(end) - work_of(tail),
        numpy.diff(trace.start),
    )


def bound_saved_work(intervals: Intervals, num_blocks: int, num_rounds: int = NUM_ROUNDS) -> float:
    """An upper bound on the work that a cache of ``num_blocks`` saves at the counted requests."""
    room = numpy.maximum(num_blocks - intervals.path_blocks, 0).astype(numpy.float64)
    touches = intervals.last == intervals.first + 1  # nothing between: always kept
    sure = float(intervals.work[touches].sum())
    first, last = intervals.first[~touches], intervals.last[~touches]
    work, count = intervals.work[~touches], intervals.num_blocks[~touches].astype(numpy.float64)
    least, most = intervals.least[~touches], intervals.most[~touches]
    if not len(work):
        return sure
    above = work - count * least  # what the run is worth when a block costs the least
    slope = above / numpy.maximum(most - least, 1e-12)
    span = count * (last - first - 1)
    prices = numpy.full(len(room), _even_price(work, span, float(room.sum())))
    lowest = float("inf")
    momentum = numpy.zeros(len(room))
    for turn in range(num_rounds):
        paid = numpy.concatenate([[0.0], numpy.cumsum(prices)])
        price = paid[last] - paid[first + 1]  # of keeping one block of the run
        # Block by block the gain is convex in the price, so it lies below its chord.
        gain = numpy.where(price <= least, work - count * price, slope * (most - price))
        kept = numpy.where(price < most, count, 0.0)
        lowest = min(lowest, float(numpy.maximum(gain, 0.0).sum() + prices @ room))
        if not prices.any():
            break  # nothing is scarce
        change = numpy.bincount(first + 1, kept, minlength=len(room) + 1)
        change -= numpy.bincount(last, kept, minlength=len(room) + 1)
        excess = (numpy.cumsum(change)[:-1] - room) / numpy.maximum(room, 1.0)
        momentum = 0.7 * momentum + 0.3 * excess
        step = 0.5 * float(prices.mean() + 1e-12) / (1 + turn / 8)
        prices = numpy.maximum(prices + step * momentum, 0.0)
    return sure + lowest


def _even_price(work: Floats, span: Floats, area: float) -> float:
    """One price for all requests: the best rate that does not fit any more into the whole area."""
    rate = work / span
    order = numpy.argsort(-rate)
    full = int(numpy.searchsorted(numpy.cumsum(span[order]), area))
    return float(rate[order[full]]) if full < len(order) else 0.0
