"""What the scheduler is told, what it counts, and what it gives back."""

from dataclasses import dataclass

from pagemill.core.errors import ConfigError
from pagemill.core.request import FinishReason, Request
from pagemill.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_batched_tokens`` is the token budget of a step; ``max_queue`` bounds who waits."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_queue: int = 1024
    max_model_len: int = 8192
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_queue", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs {self.max_num_seqs} is more than max_num_batched_tokens"
                f" {self.max_num_batched_tokens}: each decoding sequence needs one token of it"
            )


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step gave one request. ``finish_reason`` is set on the last one."""

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start. Hit tokens count first admissions only; recomputed ones are apart."""

    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0  # of those
    num_recomputed_tokens: int = 0
    num_found_later_tokens: int = 0  # by preempted requests, beyond what they had computed
    num_output_tokens: int = 0
    num_steps: int = 0
