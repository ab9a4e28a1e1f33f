"""An executor that computes nothing but reads its KV honestly.

One slot holds the token that was written there. A step writes its tokens into their slots, reads
the whole sequence back through the block table and derives the next token from that. So a
wrong table, a lost block, a stale hit or a missing copy changes the output.
"""

import hashlib
from array import array
from collections.abc import Sequence

from pagemill.core.step import SequencePlan, SequenceResult, StepPlan, StepResult
from pagemill.core.types import StepId

VOCABULARY = 1000
UNWRITTEN = -1


Windows = Sequence[int | None]
"""The windows of the layer groups; None reads every token."""


def next_token(seen: Sequence[Sequence[int]]) -> int:
    """What follows what each group sees: any change of any token changes it."""
    digest = hashlib.sha256(b"|".join(array("i", tokens).tobytes() for tokens in seen)).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY


def visible(token_ids: Sequence[int], window: int | None) -> Sequence[int]:
    return token_ids if window is None else token_ids[-window:]


def continuation(prompt: Sequence[int], num_tokens: int, windows: Windows = (None,)) -> list[int]:
    """The right output, computed with no cache and no blocks."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token([visible(tokens, window) for window in windows]))
    return tokens[len(prompt) :]


class ReadingExecutor:
    """Executor over one list of slots a layer group."""

    def __init__(self, num_blocks: Sequence[int], block_size: int, windows: Windows) -> None:
        self._slots = [[UNWRITTEN] * (count * block_size) for count in num_blocks]
        self._block_size = block_size
        self._windows = windows
        self._plans: dict[StepId, StepPlan] = {}
        self.fail_next = False

    def submit(self, plan: StepPlan) -> StepId:
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("no memory for this step")
        self._plans[plan.step_id] = plan
        return plan.step_id

    def collect(self, step_id: StepId) -> StepResult:
        plan = self._plans.pop(step_id)
        for copy in plan.copies:
            self._copy(copy.group, copy.source, copy.target)
        for index, part in enumerate(plan.sequences):
            for group in range(len(self._slots)):
                self._write(part, group, self._table(plan, group, index))
        results = [self._read(plan, index, part) for index, part in enumerate(plan.sequences)]
        return StepResult(step_id, tuple(results), time_ns=1)

    def close(self) -> None:
        self._plans.clear()

    def swap_blocks(self, one: int, other: int) -> None:
        """Damage: exchange the contents of two blocks. The negative control of equality tests."""
        size, slots = self._block_size, self._slots[0]
        for i in range(size):
            a, b = one * size + i, other * size + i
            slots[a], slots[b] = slots[b], slots[a]

    def _table(self, plan: StepPlan, group: int, index: int) -> list[int]:
        tables = plan.tables[group]
        return [tables.block_ids[i] for i in range(tables.indptr[index], tables.indptr[index + 1])]

    def _slot(self, table: Sequence[int], position: int) -> int:
        block = table[position // self._block_size]
        assert block != 0, "the null block is never used"
        return block * self._block_size + position % self._block_size

    def _copy(self, group: int, source: int, target: int) -> None:
        size, slots = self._block_size, self._slots[group]
        slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]

    def _write(self, part: SequencePlan, group: int, table: Sequence[int]) -> None:
        for offset, token in enumerate(part.token_ids):
            self._slots[group][self._slot(table, part.start + offset)] = token

    def _read(self, plan: StepPlan, index: int, part: SequencePlan) -> SequenceResult:
        if part.sampling is None:
            return SequenceResult(part.sequence_id, None)
        end = part.start + part.count
        seen = []
        for group, window in enumerate(self._windows):
            table = self._table(plan, group, index)
            # every query of the part reads its whole window, not only the last one
            first = 0 if window is None else max(0, part.start - window + 1)
            tokens = [self._slots[group][self._slot(table, at)] for at in range(first, end)]
            seen.append(visible(tokens, window))
        return SequenceResult(part.sequence_id, next_token(seen))
