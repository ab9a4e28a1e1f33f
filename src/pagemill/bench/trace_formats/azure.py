"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; lengths alone."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest


def is_it(row: Mapping[str, Any]) -> bool:
    return {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= row.keys()


def read(file: Iterable[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for row in csv.DictReader(file):
        time = datetime.fromisoformat(row["TIMESTAMP"].split(".")[0])
        fraction = float("0." + (row["TIMESTAMP"] + ".0").split(".")[1])
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield TraceRequest(time.timestamp() + fraction, (), prompt, output)
