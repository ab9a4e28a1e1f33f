"""Launches of the Triton kernels: shapes, constants and grids."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton import knobs

from pagemill.kernels.layout import KvLayout
from pagemill.kernels.triton.attend import attend_kernel, merge_kernel
from pagemill.kernels.triton.plan import DeviceBatch
from pagemill.kernels.triton.rope import rope_kernel
from pagemill.kernels.triton.write import write_kernel

if TYPE_CHECKING:
    from pagemill.kernels.triton.storage import TritonStorage

CHUNK_TOKENS = 16
MAX_TILE_VALUES = 8_192
"""Rows times channels of a row tile: with it no program needs more than 99 KiB of shared memory,
which every GPU from compute capability 8.0 on gives it."""
NUM_STAGES = 2
NO_WINDOW = 1 << 30
HOW = {
    "fp32": ("ieee", "ieee"),
    "bf16": ("two", "two"),
    "i8": ("two", "two"),
    "f8": ("two", "two"),
    "k8v4": ("two", "tf32"),
    "i4c": ("tf32", "tf32"),
}
"""How the products with K and with V are made (``attend._product``)."""


def products_of(kv_format: str) -> tuple[str, str]:
    """How a format's two products are made on this machine."""
    how_k, how_v = HOW[kv_format]
    if knobs.runtime.interpret:
        how_k, how_v = how_k.replace("two", "wide"), how_v.replace("two", "wide")
    return how_k, how_v


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


def format_constants(layout: KvLayout) -> dict[str, Any]:
    """What the kernels must know of a layout at compile time."""
    dim, entry = layout.head_dim, layout.format
    block = dim & -dim
    return {
        "FORMAT": layout.kv_format,
        "GROUP_BYTES": layout.group_bytes,
        "META": entry.meta_bytes(dim),
        "KEYS": entry.k_bytes(dim),
        "GROUPS": layout.groups_per_block,
        "D": dim,
        "DP": power_of_two(dim),
        "P": max(1, power_of_two(dim) // 64),
        "LOG": block.bit_length() - 1,
        "FACTOR": float(block) ** -0.5,
        "ROTATES_K": entry.rotates_k,
        "ROTATES_V": entry.rotates_v,
    }


def launch_write(
    storage: "TritonStorage", layer: int, k: Tensor, v: Tensor, rows: Tensor, num_scratch: int
) -> None:
    """Store ``k``, ``v`` float32 [T, K, D] (rows of a token may lie in wider rows)."""
    if not len(rows):
        return
    layout = storage.layouts[layer]
    assert layout.head_dim == k.stride(1) == v.stride(1), "the heads of a token lie side by side"
    center = storage.centers.get(layer)
    tiles = storage.tiles(layer)
    write_kernel[(len(rows), layout.num_kv_heads)](
        k,
        v,
        k.stride(0),
        v.stride(0),
        center if center is not None else k,
        tiles,
        storage.tails(layer),
        storage.scratch(layer, num_scratch),
        rows,
        **format_constants(layout),
        NUM_HEADS=layout.num_kv_heads,
        HAS_CENTERS=center is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )


def rope_shapes(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Constants of ``rope_kernel`` that follow from the head dim and the width of the table."""
    return {
        "D": head_dim,
        "R": rotary_dim,
        "HALF_P": power_of_two(rotary_dim // 2),
        "REST_P": power_of_two(max(1, head_dim - rotary_dim)),
    }


def launch_rope(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    num_kv_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """Norm and rotate the heads of q and k of ``qkv`` [T, H + 2 K, D] in place."""
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    rope_kernel[(len(qkv), num_heads + num_kv_heads)](
        qkv,
        cos_sin,
        positions,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        eps,
        qkv.stride(0),
        H=num_heads,
        **rope_shapes(qkv.shape[2], cos_sin.shape[1]),
        HAS_Q_NORM=query_norm is not None,
        HAS_K_NORM=key_norm is not None,
        num_warps=1,
    )


def tile_shape(layout: KvLayout, num_heads_each: int, num_tokens: int) -> dict[str, int]:
    """Tokens and query heads of a row tile (TT, HB), token groups of a step (NG)."""
    dim = power_of_two(layout.head_dim)
    heads = power_of_two(num_heads_each)
    most = max(1, min(128, MAX_TILE_VALUES // dim) // num_tokens)
    heads = max(min(heads, most), 16 // num_tokens)  # a product has 16 rows at least
    num_groups = (256 if layout.kv_format in ("fp32", "i4c") else 512) // dim
    return {"TT": num_tokens, "HB": heads, "NG": max(1, min(4, num_groups))}


def num_warps(num_rows: int) -> int:
    """Warps of an attention program with so many rows."""
    return 8 if num_rows >= 64 else 4


class Attention:
    """One call of attention: what its launches share."""

    def __init__(
        self,
        q: Tensor,
        storage: "TritonStorage",
        layer: int,
        batch: DeviceBatch,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        self._q, self._storage, self._layer, self._batch = q, storage, layer, batch
        self._scale, self._cap, self._sinks = scale, softcap, sinks
        self._layout = storage.layouts[layer]
        assert q.stride()[1:] == (self._layout.head_dim, 1), "the heads of a row lie side by side"
        self.out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        self._shifts = self._shift_of_rows()

    def _shift_of_rows(self) -> Tensor | None:
        """q . center float32 [T, H], where the constant part of keys counts: under a cap or beside
        a sink."""
        center = self._storage.centers.get(self._layer)
        if center is None or (not self._cap and self._sinks is None):
            return None
        rows, heads, dim = self._q.shape
        grouped = self._q.reshape(rows, len(center), heads // len(center), dim)
        return torch.einsum("tkgd,kd->tkg", grouped, center).reshape(rows, heads).contiguous()

    def run(self) -> Tensor:
        """float32 [T, H, D]."""
        batch = self._batch
        if batch.chunks is not None:
            self._attend(batch.chunks, CHUNK_TOKENS, None)
        if batch.singles is None:
            return self.out
        if batch.merges is None:
            self._attend(batch.singles, 1, None)
        else:
            self._merge(batch.singles, batch.merges)
        return self.out

    def _attend(self, items: Tensor, num_tokens: int, partials: tuple[Tensor, ...] | None) -> None:
        storage, layer, layout = self._storage, self._layer, self._layout
        num_heads, num_kv_heads = self._q.shape[1], layout.num_kv_heads
        shape = tile_shape(layout, num_heads // num_kv_heads, num_tokens)
        per_head = -(-(num_heads // num_kv_heads) // shape["HB"])
        how_k, how_v = products_of(layout.kv_format)
        attend_kernel[(len(items), num_kv_heads * per_head)](
            self._q,
            self._q.stride(0),
            self.out,
            *(partials or (self.out,) * 3),
            storage.tiles(layer),
            storage.tails(layer),
            storage.scratch(layer, self._batch.num_scratch),
            self._batch.table,
            items,
            self.out if self._shifts is None else self._shifts,
            self.out if self._sinks is None else self._sinks,
            self._scale,
            self._cap or 1.0,
            self._batch.window or NO_WINDOW,
            **format_constants(layout),
            **shape,
            H=num_heads,
            K=num_kv_heads,
            HAS_SHIFT=self._shifts is not None,
            HAS_CAP=bool(self._cap),
            HAS_SINKS=self._sinks is not None,
            IS_SPLIT=partials is not None,
            HOW_K=how_k,
            HOW_V=how_v,
            num_warps=num_warps(shape["TT"] * shape["HB"]),
            num_stages=NUM_STAGES,
        )

    def _merge(self, singles: Tensor, merges: Tensor) -> None:
        num_heads, dim = self._q.shape[1:]
        count = (self._batch.num_partials, num_heads)
        acc, top, total = (self.out.new_empty(shape) for shape in ((*count, dim), count, count))
        self._attend(singles, 1, (acc, top, total))
        constants: Mapping[str, Any] = format_constants(self._layout)
        merge_kernel[(len(merges), num_heads)](
            acc,
            top,
            total,
            merges,
            self.out,
            self.out if self._sinks is None else self._sinks,
            **{name: constants[name] for name in ("D", "DP", "LOG", "FACTOR", "ROTATES_V")},
            H=num_heads,
            HAS_SINKS=self._sinks is not None,
            AT_ONCE=16,
            num_warps=4,
        )
