"""Qwen-Bailian (ATC'25): as Mooncake's, but timestamp in seconds, 16-token ids, and chat ids."""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest


def is_it(row: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "hash_ids", "chat_id"} <= row.keys()


def read(file: IO[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for line in file:
        row = json.loads(line)
        output = row.get("output_length", 0)
        yield TraceRequest(row["timestamp"], row["hash_ids"], row["input_length"], output)
