"""What the cache has done and holds, as values. Counters only grow; they nest as the notes say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupStats:
    """One layer group.

    ``num_blocks`` counts the null block; empty + evictable + held + 1 = num_blocks.
    """

    num_blocks: int
    num_empty: int
    num_evictable: int
    num_held: int
    num_published: int
    """Findable now: all evictable ones, and of the held ones those that are published."""
    num_stored: int
    """Blocks published since the start; stored - evicted - cleared = published."""
    num_evicted: int
    num_duplicates: int
    """Full blocks whose content was published already when they were committed."""
    num_copies: int
    """Copies on write."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """All groups together. A query is an ``open``; one of a resumed sequence is counted apart."""

    groups: tuple[GroupStats, ...]
    num_queries: int
    num_query_tokens: int
    num_hit_tokens: int
    """Of the query tokens, those found in the cache."""
    num_resumes: int
    num_resumed_tokens: int
    """Found by resumed sequences, so never a hit of the prompt."""
    num_hash_mismatches: int
    """Hashes that were equal where the contents were not."""
    num_open_tables: int
    num_pending_copies: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens of all query tokens, 0 to 1."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0
