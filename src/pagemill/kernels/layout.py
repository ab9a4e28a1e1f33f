"""Where each byte of KV lies on the device.

A *tile* is one layer's bytes of a block. Tokens are taken 16 at a time (a token group), the unit in
which number formats code; ``codec.py`` says what a group's bytes mean. Device order of one layer
group:

    [layer][block][KV head][B / 16 token groups][metadata, K, V of 16 tokens]

so that a rank's heads are one sub-range of a tile, and a tile holds all that is needed to read it.
With tokens side by side a processor sums 16 scores at once.
"""

from dataclasses import dataclass

from torch import Tensor

from pagemill.core.errors import ConfigError
from pagemill.core.layers import BLOCK_SIZES, TOKEN_GROUP
from pagemill.kernels.codec import FORMATS, KvFormat, decode_group, hadamard

KV_FORMATS = tuple(FORMATS)
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of one layer's tile. ConfigError where format, block size or head dim do not fit."""

    kv_format: str
    block_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.kv_format not in KV_FORMATS:
            raise ConfigError(
                f"KV format {self.kv_format!r}: choose one of {', '.join(KV_FORMATS)}"
            )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block size {self.block_size}: choose one of {BLOCK_SIZES}")
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % 16:
            raise ConfigError(
                f"head dim {self.head_dim}: the KV layout needs a multiple of 16 up to"
                f" {MAX_HEAD_DIM}; this model cannot be served"
            )
        if self.num_kv_heads < 1:
            raise ConfigError(f"{self.num_kv_heads} KV heads: there must be at least one")

    @property
    def format(self) -> KvFormat:
        return FORMATS[self.kv_format]

    @property
    def group_bytes(self) -> int:
        """Bytes of one head's token group: metadata, K and V."""
        return self.format.group_bytes(self.head_dim)

    @property
    def groups_per_block(self) -> int:
        return self.block_size // TOKEN_GROUP

    @property
    def tile_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        return self.num_kv_heads * self.groups_per_block * self.group_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of a layer's tail slot: 16 tokens in bf16. 0 where tokens are coded one by one."""
        if not self.format.codes_whole_groups:
            return 0
        return self.num_kv_heads * FORMATS["bf16"].group_bytes(self.head_dim)

    def decode_tiles(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, float32 [n, B, K, D] each, of tiles uint8 [n, tile_bytes]. Slow and plain.

        Rotations are undone. Keys come as they lie in the cache: minus their center.
        """
        shape = (tiles.shape[0], self.num_kv_heads, self.groups_per_block, self.group_bytes)
        keys, values = decode_group(self.kv_format, tiles.reshape(shape), self.head_dim)
        keys = hadamard(keys) if self.format.rotates_k else keys
        values = hadamard(values) if self.format.rotates_v else values
        return self._in_order(keys), self._in_order(values)

    def _in_order(self, x: Tensor) -> Tensor:
        """[n, K, groups, 16, D] to [n, B, K, D]."""
        in_order = x.permute(0, 2, 3, 1, 4).reshape(-1, self.block_size, *x.shape[1::3])
        return in_order.contiguous()
