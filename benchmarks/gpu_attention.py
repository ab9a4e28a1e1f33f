"""Decode attention on a GPU: the share of the memory's read rate that each KV format reaches.

    python benchmarks/gpu_attention.py [--quick] [--json FILE]

The limit is measured in the same run: the best rate at which this GPU sums a large tensor. Sixteen
sequences of 8,192 tokens with shuffled tables, at head size 64 (9 query heads, 3 KV heads) and 128
(32 and 8). share = bytes of the tiles that must be read / time / read rate.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from common import finish, make_parser
from pagemill.core.errors import PagemillError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.engine.device import choose_kernels
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.codec import FORMATS
from pagemill.kernels.device import Kernels
from pagemill.kernels.kv_storage import KVStorage

SHAPES = {64: (9, 3), 128: (32, 8)}
BLOCK_SIZE = 16
REPEATS = 20
READ_BYTES = 4 << 30


def main() -> None:
    parser = make_parser(__doc__ or "")
    asked = parser.parse_args()
    try:
        kernels = choose_kernels("cuda")
    except PagemillError as error:
        sys.exit(f"this benchmark measures a GPU: {error}")
    batch, context = (4, 2048) if asked.quick else (16, 8192)
    read_rate = measure_read_rate(kernels, READ_BYTES // (8 if asked.quick else 1))
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(kernels.device),
        "read_gb_s": read_rate / 1e9,
        "batch": batch,
        "context": context,
    }
    print(f"{figures['gpu']}: reads {read_rate / 1e9:.0f} GB/s")
    for dim, (num_heads, num_kv_heads) in SHAPES.items():
        for kv_format in FORMATS:
            rate = measure(kernels, kv_format, dim, num_heads, num_kv_heads, batch, context)
            share = figures[f"{kv_format}_share_d{dim}"] = rate / read_rate
            print(f"D {dim} {kv_format}: {rate / 1e9:.0f} GB/s, {share:.1%} of the read rate")
    keys = tuple(f"{name}_share_d{dim}" for dim in SHAPES for name in FORMATS)
    finish(figures, ("gpu", "read_gb_s", *keys), asked.json)


def seconds(kernels: Kernels, call: Callable[[], object], repeats: int) -> float:
    """Of one call, the best of three runs of ``repeats``."""
    call()
    kernels.wait()
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        kernels.wait()
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def measure_read_rate(kernels: Kernels, num_bytes: int) -> float:
    """Bytes a second, of a sum over a tensor that no cache of the GPU holds."""
    x = torch.ones(num_bytes // 4, device=kernels.device)
    return num_bytes / seconds(kernels, x.sum, REPEATS)


def measure(
    kernels: Kernels,
    kv_format: str,
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
    context: int,
    repeats: int = REPEATS,
) -> float:
    """Bytes of tiles a second that decode attention reads."""
    config = CacheConfig(
        (LayerGroup("full", (0,)),), (batch * context // BLOCK_SIZE + 1,), BLOCK_SIZE
    )
    storage = kernels.make_storage(config, kv_format, num_kv_heads, dim, num_tails=batch)
    tables = np.random.default_rng(0).permutation(batch * context // BLOCK_SIZE) + 1
    tables = tables.astype(np.int32).reshape(batch, -1)
    for index, table in enumerate(tables):
        fill(kernels, storage, table, index)
    last = make_batch(tables, np.full(batch, context - 1), 1, np.arange(batch))
    step = kernels.prepare(last, storage, 0)
    q = torch.randn(batch, num_heads, dim, device=kernels.device)
    one = seconds(kernels, lambda: kernels.paged_attention(q, storage, 0, step, dim**-0.5), repeats)
    return batch * context * storage.token_bytes(0) / one


def fill(kernels: Kernels, storage: KVStorage, table: np.ndarray, tail_slot: int) -> None:
    """Normal numbers in all blocks of a table, in chunks of 512 tokens."""
    context = len(table) * BLOCK_SIZE
    for start in range(0, context, 512):
        count = min(512, context - start)
        shape = (count, storage.num_kv_heads, storage.head_dim)
        k, v = (torch.randn(shape, device=kernels.device) for _ in range(2))
        chunk = make_batch(table[None], np.array([start]), count, np.array([tail_slot]))
        storage.write_step(0, k, v, kernels.prepare(chunk, storage, 0))


def make_batch(
    tables: np.ndarray, starts: np.ndarray, count: int, tail_slots: np.ndarray
) -> AttentionBatch:
    """Each sequence computes ``count`` tokens from its start on."""
    num_sequences, length = tables.shape
    return AttentionBatch(
        query_start=np.arange(num_sequences + 1, dtype=np.int32) * count,
        context_start=starts.astype(np.int32),
        block_ids=tables.ravel(),
        indptr=np.arange(num_sequences + 1, dtype=np.int32) * length,
        tail_slots=tail_slots.astype(np.int32),
    )


if __name__ == "__main__":
    main()
