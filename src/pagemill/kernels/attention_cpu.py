"""Attention over paged KV on the CPU: one ragged call for any mix of chunks and single tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.kernels.kv_storage import KVStorage

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences of a step in one layer group; any mix of chunks and single tokens.

    Rows [query_start[i], query_start[i + 1]) of q belong to sequence i, whose first one stands at
    position context_start[i]: so many tokens came before it. Its block ids are [indptr[i],
    indptr[i + 1]); entry j holds the tokens [j * B, (j + 1) * B). All int32 and contiguous:
    ``query_start`` [S + 1], ``context_start`` [S], ``block_ids`` [sum of lengths], ``indptr``
    [S + 1].

        positions   0 ............ context_start[i] ............ end
                    |  in the cache before  |  the rows of q   |
    """

    query_start: Int32s
    context_start: Int32s
    block_ids: Int32s
    indptr: Int32s


def paged_attention(
    q: Tensor,
    storage: KVStorage,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention: float32 [T, H, D] of ``q`` float32 [T, H, D]; H a multiple of K.

    K and V of the step must be written before. The token at position p reads [p - window + 1, p],
    blocks before that are not touched. ``softcap`` c turns a score s into c tanh(s / c). Rows of
    ``q`` may be a view into wider rows.

    A row's result depends on its own sequence, position and the order of tokens only: the same bits
    alone or in a batch, in one chunk or many, on one thread or more (csrc/kernels/attention.isa.cpp
    says how). It differs between instruction sets by the rounding of multiply-adds.

    ValueError where shapes, tables or block ids do not fit; nothing is read outside the arena.
    """
    group, index = storage.place(layer)
    out = torch.empty(q.shape, dtype=torch.float32)
    storage.native[group].attention(
        index,
        q,
        out,
        batch.query_start,
        batch.context_start,
        batch.block_ids,
        batch.indptr,
        scale,
        window or 0,
        softcap or 0.0,
    )
    return out
