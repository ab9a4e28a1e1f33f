"""What block borders cost: tokens that an earlier prompt had, lost because a block was not whole.

For each prompt the longest prefix that any earlier prompt begins with, in a cache without end, at
most the prompt less one token; a cache of B-token blocks serves it rounded down to B.
"""

from bisect import bisect_left

import numpy
from numpy.typing import NDArray

from pagemill.bench.traces import Trace

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)


def shared_tokens(trace: Trace) -> NDArray[numpy.int64]:
    """Of each prompt; as exact as the trace: to the token, or to its blocks."""
    return _exact(trace) if trace.is_exact else _by_blocks(trace)


def _by_blocks(trace: Trace) -> NDArray[numpy.int64]:
    seen = numpy.zeros(int(trace.token_ids.max()) + 1, bool)
    shared = numpy.zeros(trace.num_requests, numpy.int64)
    for i in range(trace.num_requests):
        ids = trace.ids(i)
        known = seen[ids]
        shared[i] = len(ids) if known.all() else int(numpy.argmin(known))
        seen[ids] = True
    return numpy.minimum(shared * trace.block_tokens, trace.prompt_tokens - 1)


def _exact(trace: Trace) -> NDArray[numpy.int64]:
    """In sorted order the prompt that shares most is a neighbour."""
    known: list[bytes] = []
    shared = numpy.zeros(trace.num_requests, numpy.int64)
    for i in range(trace.num_requests):
        prompt = trace.ids(i).astype(">u4").tobytes()
        at = bisect_left(known, prompt)
        near = known[max(0, at - 1) : at + 1]
        shared[i] = max((_common(prompt, other) for other in near), default=0) // 4
        known.insert(at, prompt)
    return numpy.minimum(shared, trace.prompt_tokens - 1)


def _common(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differ = numpy.frombuffer(a[:length], "u1") != numpy.frombuffer(b[:length], "u1")
    return int(numpy.argmax(differ)) if differ.any() else length


def waste_by_size(trace: Trace) -> dict[int, float]:
    """Block size -> tokens lost a request, beside the finest that the trace can tell."""
    shared = shared_tokens(trace)
    finest = 1 if trace.is_exact else trace.block_tokens
    sizes = (size for size in BLOCK_SIZES if size > finest or finest == 1)
    return {size: float((shared % size).mean()) for size in sizes}
