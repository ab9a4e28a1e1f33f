"""A step's sequences cut into programs: plain arrays, made once a step and layer group.

positions   0 ........ context_start ........ end         of one sequence
writing               |  16  |  16  |  16  |              a program a token group
reading               |  16  |  16  |  16  |              a program a row tile (and KV head)
reading     |   512   |   512   |   512   | *             one token: a program a split
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagemill.kernels.batch import AttentionBatch, Int32s

GROUP = 16
SPLIT_TOKENS = 512
"""A sequence that computes one token is read in splits of so many tokens: fixed, so that a row's
result does not depend on its company."""
ITEM_WORDS = 8


@dataclass(frozen=True, slots=True)
class DeviceBatch(AttentionBatch):
    """An AttentionBatch and its programs, on the device (int32).

    ``writes``: [n, 8] of ``write.py``, in one or two launches: a sequence's old tail slot is read
    in the first before the second overwrites it. ``chunks``, ``singles`` [n, 8] of ``attend.py``.
    ``merges`` [m, 4]: first partial, partials, row, 0; None where no sequence is longer than a
    split. ``num_scratch``: raw groups beside the tail slots.
    """

    window: int | None = None
    table: Tensor = field(default_factory=lambda: torch.empty(0))
    writes: tuple[Tensor, ...] = ()
    chunks: Tensor | None = None
    singles: Tensor | None = None
    merges: Tensor | None = None
    num_partials: int = 0
    num_scratch: int = 0


def make_device_batch(
    batch: AttentionBatch, block_size: int, window: int | None, device: torch.device
) -> DeviceBatch:
    """The programs of a step in a layer group with ``window``."""
    writes, raw_of = _plan_writes(batch, block_size)
    reads = _plan_reads(batch, window, raw_of)
    chunks, singles, merges = (_on_device(rows, device) for rows in reads)
    late = [row for row, is_late in writes if is_late]
    phases = [[row for row, is_late in writes if not is_late], late]
    return DeviceBatch(
        query_start=batch.query_start,
        context_start=batch.context_start,
        block_ids=batch.block_ids,
        indptr=batch.indptr,
        tail_slots=batch.tail_slots,
        window=window,
        table=torch.from_numpy(np.ascontiguousarray(batch.block_ids, np.int32)).to(device),
        writes=tuple(x for x in (_on_device(rows, device) for rows in phases) if x is not None),
        chunks=chunks,
        singles=singles,
        merges=merges,
        num_partials=sum(row[1] for row in reads[2]),
        num_scratch=-min((raw for raw in raw_of.values() if raw < 0), default=0),
    )


def _on_device(rows: list[tuple[int, ...]], device: torch.device) -> Tensor | None:
    return torch.from_numpy(np.array(rows, np.int32)).to(device) if rows else None


def _spans(batch: AttentionBatch) -> list[tuple[int, int, int, int, int]]:
    """(sequence, first row, first position, end position, start in the table) where it computes."""
    starts: Int32s = batch.context_start
    spans = []
    for i, start in enumerate(starts.tolist()):
        row, end = int(batch.query_start[i]), int(batch.query_start[i + 1])
        if end > row:
            spans.append((i, row, start, start + end - row, int(batch.indptr[i])))
    return spans


def _plan_writes(
    batch: AttentionBatch, block_size: int
) -> tuple[list[tuple[tuple[int, ...], bool]], dict[tuple[int, int], int]]:
    """Rows of ``writes``, each with whether it must come late; and the raw group of each touched
    (sequence, token group): its tail slot for the only or the unfilled last one, else the scratch.
    """
    rows: list[tuple[tuple[int, ...], bool]] = []
    raw_of: dict[tuple[int, int], int] = {}
    num_scratch = 0
    for i, row, start, end, first_entry in _spans(batch):
        tail = -1 if batch.tail_slots is None else int(batch.tail_slots[i])
        touched = range(start // GROUP, (end - 1) // GROUP + 1)
        for group in touched:
            low, high = max(start, group * GROUP), min(end, (group + 1) * GROUP)
            is_last = group == touched[-1] and high % GROUP != 0
            if len(touched) == 1 or is_last:
                raw = tail
            else:
                num_scratch += 1
                raw = -num_scratch
            raw_of[i, group] = raw
            block = int(batch.block_ids[first_entry + group * GROUP // block_size])
            part = group % (block_size // GROUP)
            lanes = (low - group * GROUP, high - group * GROUP)
            is_late = tail >= 0 and len(touched) > 1 and is_last
            rows.append(((row + low - start, *lanes, block, part, raw, tail, 0), is_late))
    return rows, raw_of


def _plan_reads(
    batch: AttentionBatch, window: int | None, raw_of: dict[tuple[int, int], int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Rows of ``chunks``, ``singles`` and ``merges``."""
    chunks: list[tuple[int, ...]] = []
    singles: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    for i, row, start, end, entry in _spans(batch):
        if end - start == 1:
            begin = max(0, end - window) if window else 0
            cuts = range(begin // SPLIT_TOKENS, (end - 1) // SPLIT_TOKENS + 1)
            merges.append((len(singles), len(cuts), row, 0))
            for cut in cuts:
                low, high = max(begin, cut * SPLIT_TOKENS), min(end, (cut + 1) * SPLIT_TOKENS)
                raw = raw_of[i, start // GROUP]
                singles.append((entry, row, start, 1, low, high, raw, len(singles)))
            continue
        for group in range(start // GROUP, (end - 1) // GROUP + 1):
            low, high = max(start, group * GROUP), min(end, (group + 1) * GROUP)
            begin = max(0, low - window + 1) if window else 0
            raw = raw_of[i, group]
            chunks.append((entry, row + low - start, low, high - low, begin, high, raw, 0))
    return chunks, singles, merges if len(merges) < len(singles) else []
