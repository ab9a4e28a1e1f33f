"""Qwen-Bailian (ATC'25): as Mooncake's, but timestamp in seconds, 16-token ids, and chat ids."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.trace_formats.rows import json_row


def is_it(row: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "hash_ids", "chat_id"} <= row.keys()


def read(file: Iterable[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for line in file:
        row = json_row(line)
        output = row.get("output_length", 0)
        yield TraceRequest(row["timestamp"], row["hash_ids"], row["input_length"], output)
