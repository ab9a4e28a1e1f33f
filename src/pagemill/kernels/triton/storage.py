"""KV memory on a device that torch and Triton share: the tiles of ``KVStorage``, byte for byte."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage, cannot_get
from pagemill.kernels.triton.launch import launch_write
from pagemill.kernels.triton.plan import GROUP, DeviceBatch, make_device_batch


class TritonStorage(KVStorage):
    """A ``KVStorage`` whose arenas are tensors on ``device``. A page read here can be written into
    one in host memory and back: its bytes do not change.

    Raw groups that a step needs beside its tail slots lie in a scratch that all layers share: a
    layer's ``write_step`` fills it, the same layer's attention reads it.
    """

    def __init__(
        self,
        config: CacheConfig,
        kv_formats: str | Sequence[str],
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device,
        centers: Tensor | None = None,
        num_tails: int = 0,
    ) -> None:
        self.device = device
        self.centers: dict[int, Tensor] = {}
        self._scratch = torch.zeros(0, dtype=torch.uint8, device=device)
        super().__init__(
            config, kv_formats, num_kv_heads, head_dim, centers=centers, num_tails=num_tails
        )

    def _make_arena(self, group: LayerGroup, num_blocks: int) -> None:
        for layer in group.layers:
            layout = self.layouts[layer]
            shapes = (num_blocks, layout.tile_bytes), (self.num_tails, layout.tail_bytes)
            try:
                tiles, tails = (
                    torch.zeros(shape, dtype=torch.uint8, device=self.device) for shape in shapes
                )
            except RuntimeError as error:  # out of memory is one
                num_bytes = self.layouts[layer].tile_bytes * num_blocks * len(group.layers)
                raise cannot_get(num_bytes, num_blocks, group, error) from error
            self._tiles[layer] = tiles
            self._tails[layer] = tails

    def _set_center(self, layer: int, center: Tensor) -> None:
        self.centers[layer] = center.to(self.device)

    def tails(self, layer: int) -> Tensor:
        """Tail slots of a layer in place: uint8 [slots, tail_bytes]."""
        return self._tails[layer]

    def scratch(self, layer: int, num_groups: int) -> Tensor:
        """Memory for so many raw groups of a layer; the same until more are asked for."""
        size = max(16, num_groups * self.layouts[layer].tail_bytes)
        if self._scratch.numel() < size:
            self._scratch = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._scratch

    def prepare(self, batch: AttentionBatch, group: int) -> DeviceBatch:
        """The batch with its programs, checked: nothing in it points outside of the pool."""
        self._check_batch(batch, group)
        return make_device_batch(batch, self.block_size, self.groups[group].window, self.device)

    def _check_batch(self, batch: AttentionBatch, group: int) -> None:
        ids = batch.block_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_blocks[group]:
            raise ValueError("a block id lies outside of the pool")
        counts = np.diff(batch.query_start)
        last = batch.context_start + counts - 1
        if (last // self.block_size >= np.diff(batch.indptr))[counts > 0].any():
            raise ValueError("a block table is shorter than its sequence")
        slots = batch.tail_slots
        if not any(self.layouts[layer].tail_bytes for layer in self.groups[group].layers):
            return
        if slots is None or len(slots) != len(batch.context_start):
            raise ValueError("this format needs a tail slot for each sequence")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_tails:
            raise ValueError("a tail slot lies outside of its pool")

    def write_kv(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """As ``KVStorage.write_kv``; ``slots`` lie in host memory."""
        group, _ = self._place[layer]
        if self.layouts[layer].format.codes_whole_groups:
            raise ValueError("this format codes whole groups: write the step with its sequences")
        places = slots.tolist()
        if places and not 0 <= min(places) <= max(places) < self.num_blocks[group] * (
            self.block_size
        ):
            raise ValueError("a slot lies outside of the pool")
        rows = torch.tensor(_runs(places, self.block_size), dtype=torch.int32).to(self.device)
        launch_write(self, layer, k, v, rows, 0)

    def write_step(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """As ``KVStorage.write_step``, for every format."""
        if not isinstance(batch, DeviceBatch):
            batch = self.prepare(batch, self._place[layer][0])
        for rows in batch.writes:
            launch_write(self, layer, k, v, rows, batch.num_scratch)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._check(group, source)
            self._check(group, target)
            for layer in self.groups[group].layers:
                self._tiles[layer][target] = self._tiles[layer][source]

    def copy_tails(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            if not (0 <= source < self.num_tails and 0 <= target < self.num_tails):
                raise ValueError("a tail slot lies outside of its pool")
            for tails in self._tails.values():
                tails[target] = tails[source]

    def read_block(self, group: int, block_id: int) -> Tensor:
        """A copy of a block's bytes in host memory, layer after layer: uint8 [block_bytes]."""
        return super().read_block(group, block_id).cpu()

    def write_block(self, group: int, block_id: int, tiles: Tensor) -> None:
        super().write_block(group, block_id, tiles.to(self.device))


def _runs(slots: list[int], block_size: int) -> list[tuple[int, ...]]:
    """Rows of ``writes`` for neighbouring slots of one token group. Tokens of a group must stand
    together: two programs in one group would write the same bytes."""
    rows: list[tuple[int, ...]] = []
    seen: set[int] = set()
    first = 0
    for i in range(1, len(slots) + 1):
        is_next = i < len(slots) and slots[i] == slots[i - 1] + 1 and slots[i] % GROUP
        if is_next:
            continue
        group, lane = divmod(slots[first], GROUP)
        assert group not in seen, "the tokens of a group stand together"
        seen.add(group)
        block, part = divmod(group, block_size // GROUP)
        rows.append((first, lane, lane + i - first, block, part, 0, -1, 0))
        first = i
    return rows if slots else []
