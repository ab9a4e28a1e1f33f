"""Storages in host memory and on the device with the same sizes, for the tests of tests/gpu."""

import numpy as np
import torch
from torch import Tensor

from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.codec import hadamard
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.triton.kernels import TritonKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = TritonKernels(DEVICE)


def storages(
    kv_format: str,
    dim: int,
    *,
    num_kv_heads: int = 2,
    num_blocks: int = 5,
    block_size: int = 32,
    window: int | None = None,
    centers: Tensor | None = None,
) -> tuple[KVStorage, KVStorage]:
    """One layer, 3 tail slots: (in host memory, on the device)."""
    config = CacheConfig((LayerGroup("g", (0,), window),), (num_blocks,), block_size)
    return (
        KVStorage(config, kv_format, num_kv_heads, dim, centers=centers, num_tails=3),
        KERNELS.make_storage(config, kv_format, num_kv_heads, dim, centers=centers, num_tails=3),
    )


def hard_rows(num_tokens: int, num_kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Channels of all sizes, zeros, equal rows, huge, tiny and not finite numbers."""
    k = torch.randn(num_tokens, num_kv_heads, dim) * torch.logspace(-2, 2, dim)
    v = torch.randn(num_tokens, num_kv_heads, dim)
    k[5], v[7], v[8] = 0, 0, -0.0
    k[9, 0, 0], v[3], k[16:20] = 3e4, v[3] * 1e-9, 1.25
    k[4] *= 1e4
    v[11, -1, 3], k[12, 0, 0] = float("nan"), float("inf")
    return k, v


def sequences(
    spans: list[tuple[int, int]], block_size: int, window: int | None = None
) -> tuple[AttentionBatch, int]:
    """A batch of (tokens before, tokens of the step) with blocks in random order, and the blocks it
    needs. Entries that left the window are the null block; sequence i has tail slot i."""
    needs = [-(-(before + count) // block_size) for before, count in spans]
    free = (torch.randperm(sum(needs)) + 1).tolist()
    tables = [[free.pop() for _ in range(need)] for need in needs]
    for table, (before, _) in zip(tables, spans, strict=True):
        gone = max(0, before - window + 1) // block_size if window else 0
        table[:gone] = [0] * gone
    counts = [count for _, count in spans]
    return AttentionBatch(
        np.cumsum([0, *counts]).astype(np.int32),
        np.array([before for before, _ in spans], np.int32),
        np.array([block for table in tables for block in table], np.int32),
        np.cumsum([0, *needs]).astype(np.int32),
        np.arange(len(spans), dtype=np.int32) if len(spans) <= 3 else None,
    ), sum(needs) + 1


def write_in_host(host: KVStorage, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
    """By the sequences of a batch, whatever the format."""
    if host.has_tails:
        return host.write_step(0, k, v, batch)
    slots = []
    for i, start in enumerate(batch.context_start.tolist()):
        table = torch.from_numpy(batch.block_ids[batch.indptr[i] : batch.indptr[i + 1]])
        at = torch.arange(start, start + int(batch.query_start[i + 1] - batch.query_start[i]))
        slots.append(table[at // host.block_size] * host.block_size + at % host.block_size)
    return host.write_kv(0, k, v, torch.cat(slots))


def next_step(batch: AttentionBatch, starts: list[int], counts: list[int]) -> AttentionBatch:
    """Another step of the sequences of ``batch``, in the same tables."""
    return AttentionBatch(
        np.cumsum([0, *counts]).astype(np.int32),
        np.array(starts, np.int32),
        batch.block_ids,
        batch.indptr,
        batch.tail_slots,
    )


def attend_plainly(
    q: Tensor,
    host: KVStorage,
    batch: AttentionBatch,
    tokens: list[tuple[Tensor, Tensor]],
    *,
    center: Tensor | float = 0.0,
    cap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The read rule plainly, in float64, scale D^-0.5. ``tokens``: all K and V so far of each
    sequence, as they were given; tiles are read from ``host``."""
    out, layout = [], host.layouts[0]
    for i, start in enumerate(batch.context_start.tolist()):
        ids = batch.block_ids[batch.indptr[i] : batch.indptr[i + 1]]
        coded_k, coded_v = (x.flatten(0, 1) for x in layout.decode_tiles(host.tiles(0)[ids]))
        k, v = tokens[i]
        raw = (k - center).bfloat16().float(), hadamard(hadamard(v).bfloat16().float())
        for row in range(int(batch.query_start[i]), int(batch.query_start[i + 1])):
            t = start + row - int(batch.query_start[i])
            own = t // 16 * 16 if layout.format.codes_whole_groups else t + 1
            first = max(0, t - window + 1) if window else 0
            keys = torch.cat([coded_k[:own], raw[0][own : t + 1]])[first:] + center
            values = torch.cat([coded_v[:own], raw[1][own : t + 1]])[first:]
            out.append(_attend_row(q[row], keys, values, cap, sinks))
    return torch.stack(out)


def _attend_row(q: Tensor, k: Tensor, v: Tensor, cap: float | None, sinks: Tensor | None) -> Tensor:
    """``q`` [H, D] over [T, K, D]."""
    each = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(each, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * q.shape[1] ** -0.5
    scores = torch.tanh(scores / cap) * cap if cap else scores
    sink = torch.full((q.shape[0],), -torch.inf) if sinks is None else sinks
    weights = torch.cat([scores, sink.double()[:, None]], 1).softmax(1)[:, :-1]
    return torch.einsum("ht,thd->hd", weights, v).float()


def bound(kv_format: str) -> float:
    """The most that attention may be off, a little over what was seen. Under the interpreter all
    products but those of two bf16 numbers are float32 ones."""
    if kv_format == "fp32":
        return 2e-6
    is_tf32 = kv_format in ("k8v4", "i4c") and DEVICE.type == "cuda"
    return 2e-3 if is_tf32 else 5e-5


def error(got: Tensor, want: Tensor) -> float:
    """Relative error of the whole."""
    return float((got.cpu() - want).norm() / want.norm())
