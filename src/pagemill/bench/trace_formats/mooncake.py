"""Mooncake (FAST'25): JSON lines; timestamp (ms), input_length, output_length, hash_ids (512)."""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest


def is_it(row: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "hash_ids"} <= row.keys()


def read(file: IO[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for line in file:
        row = json.loads(line)
        output = row.get("output_length", 0)
        yield TraceRequest(row["timestamp"] / 1e3, row["hash_ids"], row["input_length"], output)
