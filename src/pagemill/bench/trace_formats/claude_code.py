"""Sessions of Claude Code (callanjfox/kv-cache-tester): one line a session, ids of 64 tokens.

Ids are local to a session and coded as runs: first, count, first, count. The file has no common
clock: the options say when each session starts. Tools and system prompt are
taken as shared between sessions of equal (model, tool tokens, system tokens): an assumption, the
file cannot say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.trace_formats.rows import json_row

BLOCK_TOKENS = 64

Ids = NDArray[numpy.int64]


class _Numbers:
    """Gives every session, and every shared prefix, a range of ids of its own."""

    def __init__(self) -> None:
        self._next = 0
        self._prefixes: dict[tuple[str, int, int], int] = {}

    def take(self, count: int) -> int:
        self._next += count
        return self._next - count

    def prefix(self, model: str, tool: int, system: int) -> Ids:
        """The ids of the whole blocks that tools and system prompt fill."""
        count = (tool + system) // BLOCK_TOKENS
        key = (model, tool, system)
        if key not in self._prefixes:
            self._prefixes[key] = self.take(count)
        return numpy.arange(count, dtype=numpy.int64) + self._prefixes[key]


def is_it(row: Mapping[str, Any]) -> bool:
    return {"id", "block", "tool", "sys", "requests"} <= row.keys()


def read(file: Iterable[str], options: ReadOptions) -> Iterator[TraceRequest]:
    numbers = _Numbers()
    for number, line in enumerate(file):
        session = json_row(line)
        first = numbers.take(_largest(session) + 1)
        yield from _requests(session, first, options.start_s(number), numbers)


def _largest(part: Mapping[str, Any]) -> int:
    """The largest id of a session; a sub-agent shares its ids."""
    found = 0
    for row in part["requests"]:
        runs = row.get("h", ())
        ends = (begin + count - 1 for begin, count in zip(runs[::2], runs[1::2], strict=True))
        found = max(found, _largest(row) if "sub" in row else max(ends, default=0))
    return found


def _requests(
    part: Mapping[str, Any], first: int, start_s: float, numbers: _Numbers
) -> Iterator[TraceRequest]:
    for row in part["requests"]:
        if "sub" in row:
            yield from _requests(row, first, start_s, numbers)
            continue
        ids = _expand(row["h"]) + first
        prefix = numbers.prefix(row["m"], part["tool"], part["sys"])[: len(ids)]
        ids[: len(prefix)] = prefix
        tools = row.get("stop") == "tool_use"
        yield TraceRequest(start_s + row["t"], ids, row["in"], row["out"], tools)


def _expand(runs: Sequence[int]) -> Ids:
    parts = [
        numpy.arange(begin, begin + count, dtype=numpy.int64)
        for begin, count in zip(runs[::2], runs[1::2], strict=True)
    ]
    return numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.int64)
