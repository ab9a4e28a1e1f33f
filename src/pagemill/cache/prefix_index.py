"""What a look into a prefix index gives.

A match leaves the last known token to be computed (its logits are wanted). Which blocks a match of
n tokens needs, for the next token at position n:

    full group      [0 ................................. n)   every block
    window group    [0 ...... n - w + 1)[n - w + 1 ..... n)   the blocks of the second part

n is the largest on which all groups agree. The flat index finds whole blocks, by hash, and believes
none before parent and token ids are equal as well. The radix index compares tokens and nothing
else; with one full group its n is exact, and the block that n falls into is copied before it is
written. Where other groups must agree it gives whole blocks.
"""

from dataclasses import dataclass

from pagemill._native import Match
from pagemill.core.types import BlockHash, BlockId, GroupId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """``num_tokens`` of a prompt are cached. Good until the cache changes; holds nothing."""

    num_tokens: int
    namespace: bytes
    native: Match

    @property
    def key(self) -> BlockHash:
        """The hash of the last matched block; the namespace where nothing matched."""
        return BlockHash(self.native.key)

    def block_ids(self, group: GroupId) -> tuple[BlockId, ...]:
        """One entry a matched block, the partly matched one included; the null block where the
        window does not reach."""
        return tuple(BlockId(block) for block in self.native.block_ids(group))
