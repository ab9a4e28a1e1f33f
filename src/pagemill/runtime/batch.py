"""StepPlan -> tensors. Shapes: T tokens of the step, S sequences, B block size.

token_ids  int64 [T]     the parts of all sequences, one after another
positions  int32 [T]     start + 0 .. count - 1 of each part
slots      int32 [T]     per group: table[position // B] * B + position % B
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagemill.core.step import GroupTables, SharedRun, StepPlan
from pagemill.kernels.batch import AttentionBatch, SharedBlocks
from pagemill.models.decoder import TokenBatch

Int32 = npt.NDArray[np.int32]


def make_batch(plan: StepPlan, block_size: int) -> TokenBatch:
    """The tensors of a plan."""
    starts = np.array([part.start for part in plan.sequences], dtype=np.int32)
    counts = np.array([part.count for part in plan.sequences], dtype=np.int32)
    token_ids = np.concatenate([np.asarray(part.token_ids) for part in plan.sequences])
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    sequence_of = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(token_ids), dtype=np.int32)
    positions += (starts - query_start[:-1])[sequence_of]
    tail_slots = np.array(plan.tail_slots, dtype=np.int32) if plan.tail_slots else None
    slots, attention = [], []
    shared = [_shared(runs) for runs in plan.shared] or [None] * len(plan.tables)
    for tables, runs in zip(plan.tables, shared, strict=True):
        slots.append(torch.from_numpy(_slots(tables, sequence_of, positions, block_size)))
        attention.append(
            AttentionBatch(
                query_start=query_start,
                context_start=starts,
                block_ids=np.asarray(tables.block_ids, dtype=np.int32),
                indptr=np.asarray(tables.indptr, dtype=np.int32),
                tail_slots=tail_slots,
                shared=runs,
            )
        )
    return TokenBatch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=tuple(slots),
        attention=tuple(attention),
    )


def _shared(runs: Sequence[SharedRun]) -> SharedBlocks | None:
    if not runs:
        return None
    members = [run.members for run in runs]
    return SharedBlocks(
        runs=np.array([(run.first, run.num_blocks) for run in runs], dtype=np.int32).ravel(),
        members=np.concatenate(members).astype(np.int32),
        run_indptr=np.cumsum([0, *map(len, members)]).astype(np.int32),
    )


def _slots(
    tables: GroupTables,
    sequence_of: npt.NDArray[np.intp],
    positions: Int32,
    block_size: int,
) -> Int32:
    block_ids, indptr = np.asarray(tables.block_ids), np.asarray(tables.indptr)
    blocks = block_ids[indptr[:-1][sequence_of] + positions // block_size]
    assert blocks.all(), "a token would be written into the null block"
    return (blocks * block_size + positions % block_size).astype(np.int32)


def last_rows(counts: Sequence[int]) -> list[int]:
    """Row of each sequence's last token in the packed batch."""
    rows, end = [], 0
    for count in counts:
        end += count
        rows.append(end - 1)
    return rows
