"""Made traces: paths of block ids with times, for policies to disagree on."""

import random
from dataclasses import dataclass, field

from pagemill._native import CacheCore, clairvoyant_hits
from pagemill.bench.bound import without_larger
from pagemill.bench.trace_formats.request import TraceRequest
from pagemill.bench.traces import Trace, make_trace

BLOCK_TOKENS = 512


@dataclass
class TraceCase:
    """Requests in time; ``add`` numbers each prefix, so that an id has one parent."""

    rows: list[TraceRequest] = field(default_factory=list)
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, time_s: float, letters: tuple[int, ...], has_tool_calls: bool = False) -> None:
        prefixes = [letters[: j + 1] for j in range(len(letters))]
        ids = [self.known.setdefault(prefix, len(self.known)) for prefix in prefixes]
        tokens = len(ids) * BLOCK_TOKENS
        self.rows.append(TraceRequest(time_s, ids, tokens, 0, has_tool_calls))

    def trace(self) -> Trace:
        return make_trace("case", BLOCK_TOKENS, False, self.rows)


def branching_case(choose: random.Random, count: int) -> TraceCase:
    """Conversations that grow, branch, pause and end; times are multiples of 1/8 s."""
    case, stems, now_s = TraceCase(), [()] * 8, 0.0
    for _ in range(count):
        now_s += choose.choice((0.0, 0.125, 0.5, 1.0, 4.0, 64.0))
        at = choose.randrange(len(stems))
        stem: tuple[int, ...] = stems[at]
        if choose.random() < 0.2:
            stem = stem[: choose.randrange(len(stem) + 1)]
        stem = stem or (choose.randrange(3),)
        if choose.random() > 0.15:
            stem += tuple(choose.randrange(50) for _ in range(choose.randrange(1, 4)))
        stems[at] = stem if len(stem) < 14 else ()
        case.add(now_s, stem, choose.random() < 0.4)
    return case


def real_hits(
    trace: Trace, eviction: str, num_blocks: int, block_tokens: int = BLOCK_TOKENS
) -> list[int]:
    """Hit blocks of each request by the compiled cache, which must be whole at the end."""
    core = CacheCore([num_blocks + 1], [0], 1, True, False, False, eviction, block_tokens)
    hits = core.replay(
        trace.token_ids, trace.start, trace.times_ns, trace.has_tool_calls, add_last_token=True
    )
    assert core.check(2) is None
    return [int(count) for count in hits]


def bound_hits(trace: Trace, num_blocks: int) -> int:
    """Of requests that fit."""
    served = without_larger(trace, num_blocks)
    hits = clairvoyant_hits(
        served.token_ids, served.start, served.times_ns, served.has_tool_calls, num_blocks
    )
    return int(hits.sum())
