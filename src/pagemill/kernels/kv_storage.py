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
from pagemill.kernels.layout import KvLayout

_HUGE_PAGE = 2 << 20


class KVStorage:
    """One arena of tiles a layer group: uint8 [layers of the group, N, tile_bytes].

    1. ``arenas[g]`` never moves; the compiled code keeps its address.
    2. Fresh memory is zero. A tile holds finite numbers unless NaN was written into it.
    3. Block ids and slots are checked here or in the compiled code; what passes cannot leave the
       arena.

    ConfigError where the memory cannot be had, with what was asked and which flag to lower.
    """

    def __init__(
        self, config: CacheConfig, kv_format: str, num_kv_heads: int, head_dim: int
    ) -> None:
        self.layout = KvLayout(kv_format, config.block_size, num_kv_heads, head_dim)
        self.groups = config.groups
        self.num_blocks = config.num_blocks
        self._place = {
            layer: (g, i)
            for g, group in enumerate(config.groups)
            for i, layer in enumerate(group.layers)
        }
        self.arenas = tuple(map(self._allocate, self.groups, self.num_blocks))
        self.native = tuple(map(self._native_arena, self.arenas))

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layout.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return self.layout.tile_bytes // self.layout.block_size

    def _allocate(self, group: LayerGroup, num_blocks: int) -> Tensor:
        num_bytes = len(group.layers) * num_blocks * self.layout.tile_bytes
        shape = (len(group.layers), num_blocks, self.layout.tile_bytes)
        try:
            return _zero_pages(num_bytes).view(shape)
        except (OSError, OverflowError, ValueError, MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"cannot get {format_bytes(num_bytes)} of KV memory for the {num_blocks} blocks of"
                f" layer group {group.name} ({error}); lower --kv-memory or --num-blocks"
            ) from error

    def _native_arena(self, arena: Tensor) -> _native.KvArena:
        layout = self.layout
        native = _native.KvArena(
            arena.data_ptr(),
            arena.nbytes,
            arena.shape[0],
            arena.shape[1],
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
            layout.kv_format,
        )
        assert native.tile_bytes == layout.tile_bytes, "the two descriptions of a tile differ"
        return native

    def place(self, layer: int) -> tuple[int, int]:
        """Layer group of a layer of the model, and the layer's index within it."""
        return self._place[layer]

    def block_bytes(self, group: int) -> int:
        """Bytes of a block, all layers of the group."""
        return len(self.groups[group].layers) * self.layout.tile_bytes

    def write_kv(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store ``k``, ``v`` float32 [T, K, D] at ``slots`` [T] = block id * B + offset.

        The rows of a token may be a view into a wider row. ValueError: wrong shapes or slots.
        """
        group, index = self._place[layer]
        self.native[group].write(index, k, v, slots.int())

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, in order: (source, target) ids."""
        if pairs:
            self.native[group].copy_blocks(np.array(pairs, np.int64))

    def read_block(self, group: int, block_id: int) -> Tensor:
        """A copy of a block's bytes: uint8 [layers of the group, tile_bytes]."""
        self._check(group, block_id)
        return self.arenas[group][:, block_id].clone()

    def write_block(self, group: int, block_id: int, tiles: Tensor) -> None:
        """Set a block's bytes: uint8 [layers of the group, tile_bytes]."""
        self._check(group, block_id)
        self.arenas[group][:, block_id] = tiles

    def _check(self, group: int, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks[group]:
            raise ValueError(f"block {block_id} lies outside of the pool of group {group}")


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
