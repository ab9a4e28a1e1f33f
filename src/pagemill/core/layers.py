"""Layer groups: layers that keep the same tokens share a block pool and a block table."""

from dataclasses import dataclass

from pagemill.core.errors import ConfigError
from pagemill.core.units import ceil_div

TOKEN_GROUP = 16
"""Tokens that a number format codes together."""

BLOCK_SIZES = (16, 32, 64, 128)
PREFIX_INDEXES = ("radix", "flat", "off")
EVICTIONS = (
    "lru", "lfu", "fifo", "sieve", "s3fifo", "arc", "gdsf", "reuse_rank", "reuse_rank_strict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens.

    ``window`` is None where every token is kept, else w: the token at position p reads [p - w + 1,
    p].
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"layer group {self.name}: a window of {self.window} tokens is empty")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the cache. ``num_blocks`` counts the null block, one number per group."""

    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]
    block_size: int = 16
    prefix_index: str = "radix"
    eviction: str = "lru"
    tenant_quota: float = 1.0
    """The part of the pool that one tenant's cached blocks may fill, 0 to 1."""
    num_tails: int = 0
    """Tail slots, one a sequence, for KV formats that code whole groups of 16 tokens; 0: none."""
    is_fair: bool = False
    """When blocks are short the tenant that has most cached loses first."""

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block size {self.block_size}: choose one of {BLOCK_SIZES}")
        if not self.groups or len(self.groups) != len(self.num_blocks):
            raise ConfigError("the cache needs one number of blocks for each of its layer groups")
        if self.prefix_index not in PREFIX_INDEXES:
            raise ConfigError(
                f"prefix index {self.prefix_index!r}: choose {', '.join(PREFIX_INDEXES)}"
            )
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction {self.eviction!r}: choose one of {', '.join(EVICTIONS)}")
        if not 0 < self.tenant_quota <= 1:
            raise ConfigError(
                f"tenant_quota is {self.tenant_quota}: give a part of the pool, as 0.5"
            )
        for group, num_blocks in zip(self.groups, self.num_blocks, strict=True):
            if num_blocks < 2:
                raise ConfigError(
                    f"layer group {group.name}: {num_blocks} blocks hold nothing (block 0 is the"
                    " null block); give more memory with --kv-memory or --num-blocks"
                )

    @property
    def codes_whole_groups(self) -> bool:
        return self.num_tails > 0

    @property
    def has_shares(self) -> bool:
        return self.is_fair or self.tenant_quota < 1

    def window_blocks(self, window: int, num_new_tokens: int) -> int:
        """Blocks of a window group that one sequence holds while it computes ``num_new_tokens``."""
        return ceil_div(window - 1 + num_new_tokens, self.block_size) + 1
