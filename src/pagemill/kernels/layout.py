"""Where each byte of KV lies on the device.

A *tile* is one layer's bytes of a block. Tokens are taken 16 at a time (a token group), the unit in
which number formats code. Device order of one layer group:

    [layer][block][KV head][B / 16 token groups][K then V of 16 tokens]

so that a rank's heads are one sub-range of a tile. Inside a token group (facts/kernels.md 6), in
memory order; a line of 64 bytes holds 16 tokens of a channel (K) or 16 channels of a token (V):

    fp32   K [D][16 tokens]              V [D / 16][16 tokens][16 channels]
    bf16   K [D / 2][16 tokens][2]       V [D / 16][8 token pairs][16 channels][2 tokens]

With tokens side by side a processor sums 16 scores at once, and a lane of 32 bits of a pair widens
to float32 by one shift or one mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.core.errors import ConfigError
from pagemill.core.layers import BLOCK_SIZES

TOKEN_GROUP = 16
"""Tokens that a number format codes together."""

_VALUE_BYTES = {"fp32": 4, "bf16": 2}
KV_FORMATS = tuple(_VALUE_BYTES)


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
        if self.head_dim <= 0 or self.head_dim % 16:
            raise ConfigError(
                f"head dim {self.head_dim}: the KV layout needs a multiple of 16; this model cannot"
                " be served"
            )
        if self.num_kv_heads < 1:
            raise ConfigError(f"{self.num_kv_heads} KV heads: there must be at least one")

    @property
    def k_bytes(self) -> int:
        """Bytes of K (and of V) of one head's token group."""
        return TOKEN_GROUP * self.head_dim * _VALUE_BYTES[self.kv_format]

    @property
    def group_bytes(self) -> int:
        """Bytes of K and V of one head's token group."""
        return 2 * self.k_bytes

    @property
    def groups_per_block(self) -> int:
        return self.block_size // TOKEN_GROUP

    @property
    def tile_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        return self.num_kv_heads * self.groups_per_block * self.group_bytes

    def decode_tiles(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, float32 [n, B, K, D] each, of tiles uint8 [n, tile_bytes]. Slow and plain."""
        shape = (tiles.shape[0], self.num_kv_heads, self.groups_per_block, 2, self.k_bytes)
        parts = tiles.reshape(shape)
        keys, values = parts[..., 0, :].contiguous(), parts[..., 1, :].contiguous()
        decode = {"fp32": _decode_fp32, "bf16": _decode_bf16}[self.kv_format]
        keys, values = decode(keys, values, self.head_dim)
        return self._in_order(keys), self._in_order(values)

    def _in_order(self, x: Tensor) -> Tensor:
        """[n, K, groups, 16, D] to [n, B, K, D]."""
        return x.permute(0, 2, 3, 1, 4).reshape(-1, self.block_size, *x.shape[1::3])


def _decode_fp32(keys: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Payload bytes [..., k_bytes] to float32 [..., 16, D]."""
    head = keys.shape[:-1]
    k = keys.view(torch.float32).reshape(*head, dim, 16).transpose(-1, -2)
    v = values.view(torch.float32).reshape(*head, dim // 16, 16, 16)
    return k, v.transpose(-3, -2).reshape(*head, 16, dim)


def _decode_bf16(keys: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Payload bytes [..., k_bytes] to float32 [..., 16, D]."""
    head, n = keys.shape[:-1], keys.dim() - 1
    k = keys.view(torch.bfloat16).float().reshape(*head, dim // 2, 16, 2)
    v = values.view(torch.bfloat16).float().reshape(*head, dim // 16, 8, 16, 2)
    first = list(range(n))
    k = k.permute(*first, n + 1, n, n + 2).reshape(*head, 16, dim)
    return k, v.permute(*first, n + 1, n + 3, n, n + 2).reshape(*head, 16, dim)
