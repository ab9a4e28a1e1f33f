"""A trace as arrays, and the registry of the formats that it can come from.

A request is a row of ids. In a trace of *block ids* each id stands for a whole prefix: equal ids,
equal content up to there, and the last block of a prompt may be partly filled. In a trace of
*tokens* (``is_exact``) the ids are the tokens themselves.
"""

import gzip
import json
import lzma
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy
from numpy.typing import NDArray

from pagemill._native import chain_hash
from pagemill.bench.trace_formats import azure, claude_code, mooncake, qwen, text_log
from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.trace_formats.rows import WRONG, CountedLines, checked, in_words
from pagemill.core.errors import ConfigError

MOST_BLOCK_TOKENS = 1 << 20
Reader = Callable[[Iterable[str], ReadOptions], Iterator[TraceRequest]]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How one kind of file is known and read. ``block_tokens`` 1: ids are tokens; 0: no ids."""

    is_it: Callable[[Mapping[str, Any]], bool]
    read: Reader
    block_tokens: int


FORMATS: Mapping[str, TraceFormat] = MappingProxyType(
    {
        "qwen": TraceFormat(qwen.is_it, qwen.read, 16),
        "mooncake": TraceFormat(mooncake.is_it, mooncake.read, 512),
        "claude_code": TraceFormat(claude_code.is_it, claude_code.read, 64),
        "text_log": TraceFormat(text_log.is_it, text_log.read, 1),
        "azure": TraceFormat(azure.is_it, azure.read, 0),
    }
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times.

    Request i has the ids ``token_ids[start[i]:start[i + 1]]``. ``block_tokens`` is the size of the
    blocks that the ids stand for (a trace of tokens: the block size of the cache it is replayed
    on).
    """

    name: str
    block_tokens: int
    is_exact: bool
    token_ids: NDArray[numpy.uint32]
    start: NDArray[numpy.int64]
    times_ns: NDArray[numpy.int64]
    prompt_tokens: NDArray[numpy.int64]
    output_tokens: NDArray[numpy.int64]
    has_tool_calls: NDArray[numpy.uint8]
    num_empty: int = 0
    """Requests of no tokens that the file had besides: they are left out."""

    @property
    def num_requests(self) -> int:
        return len(self.times_ns)

    def ids(self, i: int) -> NDArray[numpy.uint32]:
        return self.token_ids[self.start[i] : self.start[i + 1]]


def make_trace(name: str, block_tokens: int, is_exact: bool, rows: Sequence[TraceRequest]) -> Trace:
    """Sorts by time (equal times keep their order) and numbers block ids from 0."""
    rows = sorted(rows, key=lambda row: row.time_s)
    if not rows:
        raise ConfigError(f"{name}: no request in it")
    lengths = [len(row.ids) for row in rows]
    flat = numpy.concatenate([numpy.asarray(row.ids, numpy.int64) for row in rows])
    if not is_exact:
        flat = _numbered(flat)
    return Trace(
        name,
        block_tokens,
        is_exact,
        flat.astype(numpy.uint32),
        numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64),
        numpy.array([round(row.time_s * 1e9) for row in rows], numpy.int64),
        numpy.array([row.prompt_tokens for row in rows], numpy.int64),
        numpy.array([row.output_tokens for row in rows], numpy.int64),
        numpy.array([row.has_tool_calls for row in rows], numpy.uint8),
    )


def _numbered(ids: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """The same ids from 0 without gaps, in their order."""
    if not len(ids) or ids.min() < 0 or ids.max() > 4 * len(ids):
        return numpy.unique(ids, return_inverse=True)[1]
    is_used = numpy.zeros(int(ids.max()) + 1, bool)
    is_used[ids] = True
    return (numpy.cumsum(is_used) - 1)[ids]


def check_block_size(block_size: int | None) -> None:
    """ConfigError where no cache has such blocks; None is the trace's own size."""
    if block_size is not None and not 1 <= block_size <= MOST_BLOCK_TOKENS:
        raise ConfigError(f"--block-size {block_size}: give 1 to {MOST_BLOCK_TOKENS} tokens")


def load_trace(
    path: Path,
    *,
    block_size: int | None = None,
    options: ReadOptions | None = None,
) -> Trace:
    """Reads any of FORMATS, plain or .gz or .xz. ConfigError names what does not fit, with its
    line. Requests of no tokens are left out and counted."""
    check_block_size(block_size)
    try:
        with _open(path) as file:
            found = _format_of(path, file)
            every = list(_read(path, found, file, options or ReadOptions()))
    except (OSError, EOFError, lzma.LZMAError, UnicodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    rows = [row for row in every if row.prompt_tokens or not found.block_tokens]
    name, num_empty = path.name.split(".")[0], len(every) - len(rows)
    if not rows:
        raise ConfigError(f"{path}: no request of a token in it")
    if found.block_tokens == 1:
        trace = make_trace(name, block_size or 16, True, rows)
        return replace(trace, num_empty=num_empty)
    trace = replace(make_trace(name, found.block_tokens, False, rows), num_empty=num_empty)
    if block_size is None or block_size == trace.block_tokens or not found.block_tokens:
        return trace
    return (
        refine(trace, block_size) if block_size < trace.block_tokens else coarsen(trace, block_size)
    )


def _read(
    path: Path, found: TraceFormat, file: IO[str], options: ReadOptions
) -> Iterator[TraceRequest]:
    lines = CountedLines(file)
    try:
        for row in found.read(lines, options):
            yield checked(row, are_tokens=found.block_tokens == 1)
    except WRONG as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise ConfigError(
            f"{path}:{lines.number}: the request cannot be read: {in_words(error)}"
        ) from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _format_of(path: Path, file: IO[str]) -> TraceFormat:
    first = file.readline()
    file.seek(0)
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = dict.fromkeys(first.strip().split(","))
    for found in FORMATS.values():
        if isinstance(row, dict) and found.is_it(row):
            return found
    raise ConfigError(
        f"{path}: no known trace; the first line is {first[:80]!r}. Known: {', '.join(FORMATS)}"
    )


def spread(hours: float, seed: int) -> Callable[[int], float]:
    """Sessions start uniformly in the first ``hours``, in seconds. ConfigError for hours that are
    none."""
    if not math.isfinite(hours) or hours < 0:
        raise ConfigError(f"--spread-hours {hours}: give 0 or more")
    stream = random.Random(seed)
    known: dict[int, float] = {}
    return lambda session: known.setdefault(session, stream.uniform(0, hours * 3600))


def coarsen(trace: Trace, block_size: int) -> Trace:
    """Blocks of ``block_size``: of each group of ids the last one; an incomplete group is left."""
    factor = _factor(block_size, trace.block_tokens)
    ids = [trace.ids(i)[factor - 1 :: factor] for i in range(trace.num_requests)]
    return _with_ids(trace, block_size, ids)


def refine(trace: Trace, block_size: int) -> Trace:
    """Smaller blocks: an id becomes as many as fit the prompt."""
    factor = _factor(trace.block_tokens, block_size)
    parts = numpy.arange(factor, dtype=numpy.uint32)
    ids = []
    for i in range(trace.num_requests):
        fine = (trace.ids(i)[:, None] * numpy.uint32(factor) + parts).reshape(-1)
        ids.append(fine[: -(-int(trace.prompt_tokens[i]) // block_size)])
    return _with_ids(trace, block_size, ids)


def _factor(large: int, small: int) -> int:
    if large % small:
        raise ConfigError(f"blocks of {large} tokens are no whole number of blocks of {small}")
    return large // small


def _with_ids(trace: Trace, block_size: int, ids: list[NDArray[numpy.uint32]]) -> Trace:
    flat = _numbered(numpy.concatenate(ids).astype(numpy.int64)).astype(numpy.uint32)
    start = numpy.concatenate([[0], numpy.cumsum([len(row) for row in ids])]).astype(numpy.int64)
    return replace(trace, block_tokens=block_size, token_ids=flat, start=start)


def block_view(trace: Trace) -> Trace:
    """The same requests as ids of whole blocks; the trace itself where it is that already."""
    if not trace.is_exact:
        return trace
    known: dict[bytes, int] = {}
    rows = []
    for i in range(trace.num_requests):
        keys = chain_hash(bytes(32), trace.ids(i), trace.block_tokens)
        row = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        rows.append(numpy.array([known.setdefault(k, len(known)) for k in row], numpy.uint32))
    flat = numpy.concatenate(rows)
    start = numpy.concatenate([[0], numpy.cumsum([len(row) for row in rows])]).astype(numpy.int64)
    return replace(trace, is_exact=False, token_ids=flat, start=start)
