"""What crosses between the scheduler and an executor: the plan of a step and its result."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pagemill.core.request import SamplingParams
from pagemill.core.types import BlockId, GroupId, IntBuffer, SequenceId, StepId, TableId


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block ``source`` to ``target`` before anything else is done."""

    group: GroupId
    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The part of a sequence that a step computes: tokens [start, start + count).

    ``token_ids`` [count] are those tokens. ``sampling`` is None where the step does not reach the
    last known token, so that no logits are needed. ``history`` is the whole sequence up to and
    including the part, and is set only where sampling depends on it; its first
    ``num_prompt_tokens`` are the prompt.
    """

    sequence_id: SequenceId
    table_id: TableId
    start: int
    count: int
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams | None = None
    history: array[int] | None = None
    prompt_logprobs: int | None = None
    next_prompt_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Block tables of all sequences of a step in one layer group, one after another.

    ``block_ids`` int32 [sum of lengths]; those of sequence i are [indptr[i], indptr[i + 1]).
    Entry j of a table holds the tokens [j * B, (j + 1) * B); the null block stands where a token
    left the window.
    """

    block_ids: IntBuffer
    indptr: IntBuffer


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Entries [first, first + num_blocks) that are the same blocks in all of these tables.

    ``members`` are places in the call, or in the step: attention reads the run once for them.
    """

    first: int
    num_blocks: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to copy, then what to compute. ``tables`` has one entry per layer group."""

    step_id: StepId
    sequences: tuple[SequencePlan, ...]
    tables: tuple[GroupTables, ...]
    copies: tuple[BlockCopy, ...] = ()
    tail_slots: tuple[int, ...] = ()
    """One a sequence where the KV format codes whole groups, else none."""
    shared: tuple[tuple[SharedRun, ...], ...] = ()
    """Long runs that decoding sequences share, one entry a layer group; or none at all."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.count for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of a token, its rank (1 = best), the best alternatives in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One sampled token, or None where the step did not reach the last known token."""

    sequence_id: SequenceId
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave and cost: bytes that had to be read, floating-point operations, time."""

    step_id: StepId
    sequences: tuple[SequenceResult, ...]
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    time_ns: int = 0
