"""Attention over paged KV on the CPU: one ragged call for any mix of chunks and single tokens."""

import torch
from torch import Tensor

from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage

__all__ = ["AttentionBatch", "paged_attention"]


def paged_attention(
    q: Tensor,
    storage: KVStorage,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention: float32 [T, H, D] of ``q`` float32 [T, H, D]; H a multiple of K.

    K and V of the step must be written before. The token at position p reads [p - window + 1, p],
    blocks before that are not touched. ``softcap`` c turns a score s into c tanh(s / c);
    ``sinks`` float32 [H] are one logit more for each head's softmax, without a value. Rows of ``q``
    may be a view into wider rows.

    A row's result depends on its own sequence, position and the order of tokens only: the same bits
    alone or in a batch, in one chunk or many, on one thread or more (csrc/kernels/attention.isa.cpp
    says how). It differs between instruction sets by the rounding of multiply-adds.

    ValueError where shapes, tables or block ids do not fit; nothing is read outside the arena.
    """
    group, index = storage.place(layer)
    shared = batch.shared
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
        sinks,
        batch.tail_slots,
        shared.runs if shared else None,
        shared.members if shared else None,
        shared.run_indptr if shared else None,
    )
    return out
