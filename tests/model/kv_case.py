"""Random paged caches for the tests of this room."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill import _native
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.attention_cpu import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage

ISAS = _native.available_isas()


@dataclass
class Case:
    """A storage of one layer group, filled; the chunk's queries and the plain K and V."""

    storage: KVStorage
    batch: AttentionBatch
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    slots: list[Tensor]
    scale: float
    window: int | None


def make_case(
    spans: list[tuple[int, int]],
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    block_size: int = 16,
    kv_format: str = "fp32",
    window: int | None = None,
    seed: int = 0,
) -> Case:
    """``spans``: (tokens before, tokens of the chunk) of each sequence; tables in random order.

    Blocks that left the window are the null block, filled with NaN; so is every token behind the
    end.
    """
    gen = torch.Generator().manual_seed(seed)
    num_blocks = 2 + sum(-(-(a + b) // block_size) for a, b in spans)
    group = LayerGroup("only", (0, 1), window)
    config = CacheConfig((group,), (num_blocks,), block_size)
    storage = KVStorage(config, kv_format, num_kv_heads, head_dim)
    nans = torch.full((num_blocks * block_size, num_kv_heads, head_dim), float("nan"))
    storage.write_kv(1, nans, nans, torch.arange(num_blocks * block_size))
    free = (torch.randperm(num_blocks - 1, generator=gen) + 1).tolist()
    keys, values, all_slots, tables = [], [], [], []
    for before, count in spans:
        length = before + count
        table = torch.tensor([free.pop() for _ in range(-(-length // block_size))])
        positions = torch.arange(length)
        slots = table[positions // block_size] * block_size + positions % block_size
        k, v = (torch.randn(length, num_kv_heads, head_dim, generator=gen) for _ in range(2))
        storage.write_kv(1, k, v, slots)
        if window:
            table[: max(0, before - window + 1) // block_size] = 0
        for items, item in zip(
            (keys, values, all_slots, tables), (k, v, slots, table), strict=True
        ):
            items.append(item)
    counts = np.array([count for _, count in spans])
    batch = AttentionBatch(
        np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        np.array([before for before, _ in spans], np.int32),
        torch.cat(tables).int().numpy(),
        np.cumsum([0, *map(len, tables)]).astype(np.int32),
    )
    q = torch.randn(int(counts.sum()), num_heads, head_dim, generator=gen) * 2
    return Case(storage, batch, q, keys, values, all_slots, head_dim**-0.5, window)
