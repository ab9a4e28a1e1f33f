"""An executor that computes nothing but reads its KV honestly.

One slot holds the token that was written there. A step writes its tokens into their slots, reads
the whole sequence back through the block table and derives the next token from that. So a
wrong table, a lost block, a stale hit or a missing copy changes the output.
"""

import hashlib
from array import array
from collections.abc import Sequence

from pagemill.core.step import SequencePlan, SequenceResult, StepPlan, StepResult
from pagemill.core.types import SequenceId, StepId

VOCABULARY = 1000
UNWRITTEN = -1


def next_token(token_ids: Sequence[int]) -> int:
    """What follows ``token_ids``: any change of any token changes it."""
    digest = hashlib.sha256(array("I", token_ids).tobytes()).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The right output, computed with no cache and no blocks."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ReadingExecutor:
    """Executor over a list of slots, for a model with one full layer group."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots = [UNWRITTEN] * (num_blocks * block_size)
        self._block_size = block_size
        self._plans: dict[StepId, StepPlan] = {}
        self.fail_next = False
        self.forgotten: list[SequenceId] = []

    def submit(self, plan: StepPlan) -> StepId:
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("no memory for this step")
        self._plans[plan.step_id] = plan
        return plan.step_id

    def collect(self, step_id: StepId) -> StepResult:
        plan = self._plans.pop(step_id)
        for copy in plan.copies:
            self._copy(copy.source, copy.target)
        tables = [self._table(plan, i) for i in range(len(plan.sequences))]
        for part, table in zip(plan.sequences, tables, strict=True):
            self._write(part, table)
        results = [self._read(p, t) for p, t in zip(plan.sequences, tables, strict=True)]
        return StepResult(step_id, tuple(results), time_ns=1)

    def forget(self, sequence_id: SequenceId) -> None:
        self.forgotten.append(sequence_id)

    def close(self) -> None:
        self._plans.clear()

    def swap_blocks(self, one: int, other: int) -> None:
        """Damage: exchange the contents of two blocks. The negative control of equality tests."""
        size = self._block_size
        for i in range(size):
            a, b = one * size + i, other * size + i
            self._slots[a], self._slots[b] = self._slots[b], self._slots[a]

    def _table(self, plan: StepPlan, index: int) -> list[int]:
        tables = plan.tables[0]
        return [tables.block_ids[i] for i in range(tables.indptr[index], tables.indptr[index + 1])]

    def _slot(self, table: Sequence[int], position: int) -> int:
        block = table[position // self._block_size]
        assert block != 0, "the null block is never used"
        return block * self._block_size + position % self._block_size

    def _copy(self, source: int, target: int) -> None:
        size = self._block_size
        self._slots[target * size : (target + 1) * size] = self._slots[
            source * size : (source + 1) * size
        ]

    def _write(self, part: SequencePlan, table: Sequence[int]) -> None:
        for offset, token in enumerate(part.token_ids):
            self._slots[self._slot(table, part.start + offset)] = token

    def _read(self, part: SequencePlan, table: Sequence[int]) -> SequenceResult:
        end = part.start + part.count
        seen = [self._slots[self._slot(table, position)] for position in range(end)]
        token = next_token([max(0, t) for t in seen]) if part.sampling is not None else None
        return SequenceResult(part.sequence_id, token)
