"""One request of a trace, whatever file it came from."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``ids``: block ids, tokens, or nothing where a format carries lengths alone."""

    time_s: float
    ids: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    has_tool_calls: bool = False
