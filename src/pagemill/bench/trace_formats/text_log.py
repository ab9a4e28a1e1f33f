"""Logs of prompts: JSON lines with a text (``input``, ``prompt``) or token ids, perhaps times.

Texts are tokenised by the tokenizer that the caller gives. Without times the order is the time, a
second a request.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.trace_formats.rows import json_row

TEXTS = ("input", "prompt", "text")
TOKENS = ("token_ids", "prompt_token_ids", "input_ids")
TIMES = ("t", "time", "timestamp")


def is_it(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in (*TEXTS, *TOKENS))


def read(file: Iterable[str], options: ReadOptions) -> Iterator[TraceRequest]:
    for number, line in enumerate(file):
        row = json_row(line)
        ids = next((row[name] for name in TOKENS if name in row), None)
        if ids is None:
            ids = options.tokenize(_text(row))
        time_s = next((float(row[name]) for name in TIMES if name in row), float(number))
        output = options.tokenize(row["output"]) if isinstance(row.get("output"), str) else ()
        yield TraceRequest(time_s, ids, len(ids), len(output))


def _text(row: Mapping[str, Any]) -> str:
    text = next((row[name] for name in TEXTS if name in row), None)
    if not isinstance(text, str):
        raise ValueError(f"no prompt: give one of {', '.join((*TEXTS, *TOKENS))}")
    return text
