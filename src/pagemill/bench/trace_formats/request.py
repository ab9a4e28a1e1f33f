"""One request of a trace, whatever file it came from, and how to read one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``ids``: block ids, tokens, or nothing where a format carries lengths alone."""

    time_s: float
    ids: Sequence[int] | NDArray[numpy.int64]
    prompt_tokens: int
    output_tokens: int
    has_tool_calls: bool = False


def _bytes(text: str) -> Sequence[int]:
    return list(text.encode())


def _at_once(session: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a file does not say: the tokens of a text, and when a session starts, in seconds."""

    tokenize: Callable[[str], Sequence[int]] = _bytes
    start_s: Callable[[int], float] = _at_once
