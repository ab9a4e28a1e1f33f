"""Attention as the textbook has it: slow, plain, in float64. The measure of the real kernels."""

import torch
from torch import Tensor

from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage


def paged_attention_ref(
    q: Tensor,
    storage: KVStorage,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """float32 [T, H, D] of ``q`` float32 [T, H, D]; as ``attention_cpu.paged_attention``."""
    group, index = storage.place(layer)
    out = torch.empty_like(q)
    for i in range(len(batch.context_start)):
        begin, end = int(batch.query_start[i]), int(batch.query_start[i + 1])
        start = int(batch.context_start[i])
        first = max(0, start - window + 1) if window else 0
        ids = batch.block_ids[int(batch.indptr[i]) : int(batch.indptr[i + 1])]
        k, v = _read_tokens(storage, group, index, ids.tolist(), first, start + end - begin)
        out[begin:end] = _attend(q[begin:end], k, v, start - first, scale, window, softcap)
    return out


def _read_tokens(
    storage: KVStorage, group: int, index: int, ids: list[int], first: int, end: int
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens [first, end) of a table: float64 [end - first, K, D] each."""
    size, layer = storage.block_size, storage.groups[group].layers[index]
    low, high = first // size, -(-end // size)
    tiles = storage.tiles(layer)[ids[low:high]]
    k, v = (x.flatten(0, 1).double() for x in storage.layouts[layer].decode_tiles(tiles))
    return k[first - low * size : end - low * size], v[first - low * size : end - low * size]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """``q`` [n, H, D] from position ``start`` on, over ``k``, ``v`` [m, K, D] from position 0."""
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(start, start + q.shape[0])[:, None]
    columns = torch.arange(k.shape[0])[None]
    visible = columns <= rows
    if window:
        visible &= columns > rows - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
