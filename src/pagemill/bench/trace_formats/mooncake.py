"""Mooncake (FAST'25): JSON lines; timestamp (ms), input_length, output_length, hash_ids (512)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.trace_formats.rows import json_row


def is_it(row: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "hash_ids"} <= row.keys()


def read(file: Iterable[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for line in file:
        row = json_row(line)
        output = row.get("output_length", 0)
        yield TraceRequest(row["timestamp"] / 1e3, row["hash_ids"], row["input_length"], output)
