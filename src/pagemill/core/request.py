"""A request as the scheduler sees it: tokens known, tokens computed, how to choose the next."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from pagemill.core.errors import RequestError
from pagemill.core.retention import KEEP_AS_USUAL, Retention
from pagemill.core.types import RequestId, SequenceId, TableId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The meaning of each field is that of the OpenAI and vLLM APIs.

    temperature 0 is greedy. ``logprobs`` is the number of best alternatives to report (0: only the
    chosen token's), None: no report. ``seed`` makes a request repeatable.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}: 0 or -1 switch it off", "top_k")
        if self.top_p == 0.0:
            raise RequestError("top_p is 0: it must be above 0; 1 switches it off", "top_p")

    @property
    def needs_history(self) -> bool:
        """True where the choice depends on the tokens before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} is {value}: it must lie between {low} and {high}", name)


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends, as far as tokens tell. Stop strings belong to the engine facade."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


class RequestStatus(Enum):
    """waiting -> running -> finished; running -> preempted -> running; any -> finished by abort."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence ended; the values are those of the OpenAI API, and abort and error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Request:
    """One token stream and its progress. Only the scheduler changes it.

    ``token_ids`` [num_tokens] is the prompt followed by the output. Intervals:

        0 ............ num_computed_tokens ............ num_tokens
        |  KV is in the cache, or in a   |  to be computed; the  |
        |  step that is running          |  last one gives logits |
        0 ..... num_prompt_tokens ............................. num_tokens
    """

    request_id: RequestId
    sequence_id: SequenceId
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    namespace: bytes
    arrival_ns: int
    priority: int = 0
    skip_cache_read: bool = False
    tenant_id: int = 0
    retention: Retention = KEEP_AS_USUAL
    has_tools: bool = False
    status: RequestStatus = RequestStatus.WAITING
    table_id: TableId | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_scored_tokens: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    stop_token_id: int | None = field(default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """How far computed is behind known."""
        return len(self.token_ids) - self.num_computed_tokens
