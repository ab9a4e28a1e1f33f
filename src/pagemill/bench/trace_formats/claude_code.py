"""Sessions of Claude Code (callanjfox/kv-cache-tester): one line a session, ids of 64 tokens.

Ids are local to a session and coded as runs: first, count, first, count. The file has no common
clock: the options say when each session starts. Tools and system prompt are
taken as shared between sessions of equal (model, tool tokens, system tokens): an assumption, the
file cannot say.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest

BLOCK_TOKENS = 64
IDS_OF_A_SESSION = 1 << 32
SHARED_IDS = 1 << 20
"""Room for the ids of one session, and for those of one shared prefix."""


def is_it(row: Mapping[str, Any]) -> bool:
    return {"id", "block", "tool", "sys", "requests"} <= row.keys()


def read(file: IO[str], options: ReadOptions) -> Iterator[TraceRequest]:
    shared: dict[tuple[str, int, int], int] = {}
    for number, line in enumerate(file):
        session = json.loads(line)
        yield from _requests(session, session, number, options.start_s(number), shared)


def _requests(
    part: Mapping[str, Any],
    session: Mapping[str, Any],
    number: int,
    start_s: float,
    shared: dict[tuple[str, int, int], int],
) -> Iterator[TraceRequest]:
    for row in part["requests"]:
        if "sub" in row:
            yield from _requests(row, session, number, start_s, shared)
            continue
        prefix_tokens = part["tool"] + part["sys"]
        key = (row["m"], part["tool"], part["sys"])
        prefix = shared.setdefault(key, len(shared) * SHARED_IDS)
        ids = [(number + 1) * IDS_OF_A_SESSION + i for i in _expand(row["h"])]
        num_shared = min(prefix_tokens // BLOCK_TOKENS, len(ids))
        ids[:num_shared] = range(prefix, prefix + num_shared)
        tools = row.get("stop") == "tool_use"
        yield TraceRequest(start_s + row["t"], ids, row["in"], row["out"], tools)


def _expand(runs: Sequence[int]) -> Iterator[int]:
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(first, first + count)
