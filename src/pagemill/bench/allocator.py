"""Contiguous buffers against blocks, on the real lengths of a trace.

contiguous   each request reserves one buffer of the longest length, as it cannot know its own
paged        each request holds whole blocks for its tokens, the last one partly filled

Lengths are prompt and output together, at the end of the request: its largest. What a request does
not use of what it reserved is waste.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy
from numpy.typing import NDArray

from pagemill.bench.traces import Trace
from pagemill.core.errors import ConfigError

LONG_PROMPT_TOKENS = 256
ALLOCATORS = ("contiguous", "paged")


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """Tokens of slots; ``waste`` is the share of the reserved that is not used.

    ``num_fit``: how many of the requests, in order and all at once, fit into ``memory_tokens``.
    ``waste_long`` and ``waste_short``: of requests whose prompt has more than 256 tokens, and of
    the others; None where there are none.
    """

    trace: str
    allocator: str
    block_size: int
    num_requests: int
    reserved_tokens: int
    used_tokens: int
    waste: float
    waste_long: float | None
    waste_short: float | None
    num_short: int
    memory_tokens: int
    num_fit: int

    def row(self) -> dict[str, str | int | float | None]:
        return asdict(self)


def compare(
    trace: Trace,
    allocators: Sequence[str] = ALLOCATORS,
    block_size: int = 16,
    max_tokens: int | None = None,
    memory_tokens: int | None = None,
) -> list[AllocatorRow]:
    """``max_tokens``: of a contiguous buffer, else the longest of the trace. ``memory_tokens``: by
    default what 16 such buffers take."""
    used = trace.prompt_tokens + trace.output_tokens
    longest = max_tokens or int(used.max())
    if longest < int(used.max()):
        raise ConfigError(f"a buffer of {longest} tokens: the trace has {int(used.max())}")
    memory = memory_tokens or 16 * longest
    is_long = trace.prompt_tokens > LONG_PROMPT_TOKENS
    rows = []
    for name in allocators:
        if name == "contiguous":
            reserved = numpy.full(len(used), longest)
        else:
            reserved = -(-used // block_size) * block_size
        rows.append(
            AllocatorRow(
                trace=trace.name,
                allocator=name,
                block_size=block_size if name == "paged" else longest,
                num_requests=len(used),
                reserved_tokens=int(reserved.sum()),
                used_tokens=int(used.sum()),
                waste=_waste(reserved, used),
                waste_long=_waste(reserved[is_long], used[is_long]) if is_long.any() else None,
                waste_short=None if is_long.all() else _waste(reserved[~is_long], used[~is_long]),
                num_short=int((~is_long).sum()),
                memory_tokens=memory,
                num_fit=int(numpy.searchsorted(numpy.cumsum(reserved), memory, side="right")),
            )
        )
    return rows


def _waste(reserved: NDArray[numpy.int64], used: NDArray[numpy.int64]) -> float:
    return float(1 - used.sum() / reserved.sum())
