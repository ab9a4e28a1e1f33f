"""The KV memory of all layer groups, and what is done with it besides attention."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill import _native
from pagemill.core.errors import ConfigError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.core.units import format_bytes
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.layout import KvLayout

_HUGE_PAGE = 2 << 20
_LARGEST_SLOT = (1 << 31) - 1


class KVStorage:
    """One arena of tiles a layer group, layer after layer; each layer in a KV format of its own.

    1. Arenas never move; the compiled code keeps their addresses.
    2. Fresh memory is zero. A tile holds finite numbers unless NaN was written into it.
    3. Block ids and slots are checked here or in the compiled code; what passes cannot leave the
       arena.
    4. Keys are stored minus ``centers`` float32 [layers, K, D], the same number for all tokens of a
       head: softmax does not change (facts: kv_formats 6). None: 0.
    5. Layers whose format codes whole groups keep the raw tokens of unfilled ones in ``num_tails``
       tail slots, one a sequence.

    ``kv_formats``: one name for all layers of the model, or one a layer. ConfigError where the
    memory cannot be had, with what was asked and which flag to lower.
    """

    def __init__(
        self,
        config: CacheConfig,
        kv_formats: str | Sequence[str],
        num_kv_heads: int,
        head_dim: int,
        *,
        centers: Tensor | None = None,
        num_tails: int = 0,
    ) -> None:
        layers = [layer for group in config.groups for layer in group.layers]
        names = [kv_formats] * (max(layers) + 1) if isinstance(kv_formats, str) else kv_formats
        self.layouts = {
            layer: KvLayout(names[layer], config.block_size, num_kv_heads, head_dim)
            for layer in layers
        }
        self.block_size, self.num_kv_heads, self.head_dim = (
            config.block_size, num_kv_heads, head_dim)  # fmt: skip
        self.groups, self.num_blocks, self.num_tails = config.groups, config.num_blocks, num_tails
        self._place = {
            layer: (g, i)
            for g, group in enumerate(config.groups)
            for i, layer in enumerate(group.layers)
        }
        self._tiles: dict[int, Tensor] = {}
        self._tails: dict[int, Tensor] = {}
        self.native: list[_native.KvArena] = []
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            self._make_arena(group, count)
        for layer in layers if centers is not None else ():
            assert centers is not None
            self._set_center(layer, centers[layer].float().contiguous())

    def _set_center(self, layer: int, center: Tensor) -> None:
        group, index = self._place[layer]
        self.native[group].set_center(index, center.flatten())

    def _make_arena(self, group: LayerGroup, num_blocks: int) -> None:
        sizes = [self.layouts[layer].tile_bytes * num_blocks for layer in group.layers]
        memory = self._allocate(group, sum(sizes), num_blocks)
        for layer, part in zip(group.layers, torch.split(memory, sizes), strict=True):
            self._tiles[layer] = part.view(num_blocks, -1)
        native = _native.KvArena(
            memory.data_ptr(),
            memory.nbytes,
            [self.layouts[layer].kv_format for layer in group.layers],
            num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
        )
        found = [self.layouts[layer].tile_bytes for layer in group.layers]
        assert native.tile_bytes == found, "the two descriptions of a tile differ"
        for index, layer in enumerate(group.layers):
            if size := self.layouts[layer].tail_bytes * self.num_tails:
                tails = self._tails[layer] = _zero_pages(size)
                native.set_tails(index, tails.data_ptr(), size, self.num_tails)
        self.native.append(native)

    def _allocate(self, group: LayerGroup, num_bytes: int, num_blocks: int) -> Tensor:
        try:
            return _zero_pages(num_bytes)
        except (OSError, OverflowError, ValueError, MemoryError, RuntimeError) as error:
            raise cannot_get(num_bytes, num_blocks, group, error) from error

    @property
    def has_tails(self) -> bool:
        """Whether a layer codes whole groups: batches then name a tail slot for each sequence."""
        return any(layout.tail_bytes for layout in self.layouts.values())

    def place(self, layer: int) -> tuple[int, int]:
        """Layer group of a layer of the model, and the layer's index within it."""
        return self._place[layer]

    def tiles(self, layer: int) -> Tensor:
        """The tiles of a layer in place: uint8 [N, tile_bytes]."""
        return self._tiles[layer]

    def block_bytes(self, group: int) -> int:
        """Bytes of a block, all layers of the group."""
        return sum(self.layouts[layer].tile_bytes for layer in self.groups[group].layers)

    def token_bytes(self, layer: int) -> float:
        """Bytes of one token's K and V in a layer, with its share of the metadata."""
        return self.layouts[layer].tile_bytes / self.block_size

    def write_kv(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store ``k``, ``v`` float32 [T, K, D] at ``slots`` [T] = block id * B + offset.

        The rows of a token may be a view into a wider row. ValueError: wrong shapes or slots, or a
        format that codes whole groups (``write_step``).
        """
        group, index = self._place[layer]
        if slots.dtype != torch.int32 and slots.numel():
            if slots.is_floating_point() or int(slots.abs().max()) > _LARGEST_SLOT:
                raise ValueError("a slot lies outside of the pool, or is no whole number")
        self.native[group].write(index, k, v, slots.int())

    def write_step(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Store ``k``, ``v`` float32 [T, K, D] of a step in a format that codes whole groups.

        A group of 16 tokens is coded when its last token is there; until then its tokens lie in the
        tail slot of their sequence. The next ``attention`` of the layer must have the same batch.
        """
        group, index = self._place[layer]
        self.native[group].write_step(
            index,
            k,
            v,
            batch.query_start,
            batch.context_start,
            batch.block_ids,
            batch.indptr,
            batch.tail_slots,
        )

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, in order: (source, target) ids."""
        if pairs:
            self.native[group].copy_blocks(np.array(pairs, np.int64))

    def copy_tails(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy tail slots, all layers, in order: (source, target)."""
        if pairs:
            for native in self.native:
                native.copy_tails(np.array(pairs, np.int64))

    def read_block(self, group: int, block_id: int) -> Tensor:
        """A copy of a block's bytes, layer after layer: uint8 [block_bytes]."""
        self._check(group, block_id)
        return torch.cat([self._tiles[layer][block_id] for layer in self.groups[group].layers])

    def write_block(self, group: int, block_id: int, tiles: Tensor) -> None:
        """Set a block's bytes: uint8 [block_bytes]."""
        self._check(group, block_id)
        sizes = [self.layouts[layer].tile_bytes for layer in self.groups[group].layers]
        for layer, tile in zip(self.groups[group].layers, torch.split(tiles, sizes), strict=True):
            self._tiles[layer][block_id] = tile

    def _check(self, group: int, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks[group]:
            raise ValueError(f"block {block_id} lies outside of the pool of group {group}")


def cannot_get(num_bytes: int, num_blocks: int, group: LayerGroup, error: Exception) -> ConfigError:
    """What to say where the KV memory of a layer group cannot be had."""
    return ConfigError(
        f"cannot get {format_bytes(num_bytes)} of KV memory for the {num_blocks} blocks of"
        f" layer group {group.name} ({error}); lower --kv-memory or --num-blocks"
    )


def _zero_pages(num_bytes: int) -> Tensor:
    """Zeroed memory from the system, in huge pages where it gives them: uint8 [num_bytes].

    Pages come at the first touch. A request beyond what the machine has is refused at once.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: slower, not wrong
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
