"""Rows of a trace file on their way in: lines are counted, a request is checked once, here."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray

from pagemill.bench.trace_formats.request import TraceRequest

MOST_TOKENS = 1 << 40
MOST_SECONDS = 9e9
"""Times are kept in 63 bits of nanoseconds: 292 years."""
WRONG = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
)
"""What a reader raises on a row that is not of its form."""


class CountedLines:
    """The lines of a file that are not blank. ``number``: that of the last one, from 1."""

    def __init__(self, file: Iterable[str]) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            if line.strip():
                yield line


def json_row(line: str) -> Mapping[str, Any]:
    """ValueError where the line is no JSON object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"this is {type(row).__name__}, no JSON object")
    return row


def in_words(error: BaseException) -> str:
    """What is wrong, in one line."""
    if isinstance(error, KeyError):
        return f"there is no {error.args[0]!r}"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error})"
    return " ".join(str(error).split()) or type(error).__name__


def checked(row: TraceRequest, *, are_tokens: bool) -> TraceRequest:
    """The same with its ids as an array. ValueError names what is out of range."""
    time_s = row.time_s
    if not _is_number(time_s) or not 0 <= time_s < MOST_SECONDS:
        raise ValueError(f"the time {time_s!r} is no number of seconds from 0 to {MOST_SECONDS:g}")
    return replace(
        row,
        ids=_token_ids(row.ids) if are_tokens else _block_ids(row.ids),
        prompt_tokens=_length("prompt", row.prompt_tokens),
        output_tokens=_length("output", row.output_tokens),
    )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _length(what: str, value: Any) -> int:
    if not _is_number(value) or value != int(value) or not 0 <= value < MOST_TOKENS:
        raise ValueError(f"the {what} length {value!r} is no count of tokens")
    return int(value)


def _whole(ids: Any) -> NDArray[Any]:
    found = numpy.asarray(ids)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ValueError("the ids are no list of whole numbers of at most 64 bits")
    return found


def _block_ids(ids: Any) -> NDArray[numpy.int64]:
    """Only their equality counts: those of 2^63 and more wrap around to negative ones."""
    return _whole(ids).astype(numpy.int64)


def _token_ids(ids: Any) -> NDArray[numpy.int64]:
    found = _whole(ids)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 1 << 32:
        raise ValueError(f"token ids go from 0 to {(1 << 32) - 1}: {found.min()} to {found.max()}")
    return found.astype(numpy.int64)
