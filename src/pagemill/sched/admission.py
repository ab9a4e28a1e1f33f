"""Who may start: there must be room for it, and for what all running requests will soon need.

    |  held  |  growth of the running ones  |  the request: known tokens, then its own growth  |
    |<-------------------------------- blocks of the pool -------------------------------->|

How far ahead one looks is the headroom, in tokens. For a new request it is one block. A request
that was preempted must be able to grow by a quarter of what it has to compute again, beside
running ones that do the same. So the recomputed lengths of a request grow like a geometric row, and
their sum stays within a few times its final length, however small the pool is. (A larger share
recomputes less and leaves more of the pool idle: 64 requests of 60 + 400 tokens over 99 blocks take
1 % more steps with a quarter than with one block, and 15 % more with the whole.)
"""

from collections.abc import Sequence

from pagemill.cache.manager import CacheManager
from pagemill.cache.prefix_index import PrefixMatch
from pagemill.core.request import Request
from pagemill.core.types import GroupId
from pagemill.core.units import ceil_div

RETURN_SHARE = 4
"""A preempted request comes back when it can grow by one part in this many of what it has lost."""


def growth_blocks(request: Request, headroom_tokens: int, cache: CacheManager) -> int:
    """Blocks that a running request needs to hold ``headroom_tokens`` more than are known, or all
    that it can ever have."""
    assert request.table_id is not None, "only a running request grows"
    held = cache.num_blocks(request.table_id, GroupId(0))
    return max(0, ceil_div(_grown(request, headroom_tokens), cache.config.block_size) - held)


def _grown(request: Request, headroom_tokens: int) -> int:
    """Tokens after ``headroom_tokens`` more, at most those of the finished request."""
    longest = request.num_prompt_tokens + request.stop.max_tokens
    return min(request.num_tokens + headroom_tokens, longest)


class Admission:
    """The room of one step. ``started`` must be told of each request that was let in."""

    def __init__(
        self, cache: CacheManager, running: Sequence[Request], *, chunk_tokens: int
    ) -> None:
        self._cache = cache
        self._running = list(running)
        self._chunk_tokens = chunk_tokens
        self._reserves: dict[int, int] = {}  # blocks for the running ones, by headroom

    def match(self, request: Request) -> PrefixMatch | None:
        """What the cache has of a waiting request, if it may start now; else None.

        Alone it may always start: what can never fit was refused when it came. A partly matched
        block needs one block more, for its copy; where that one is missing, whole blocks are taken.
        """
        known = request.token_ids[:1] if request.skip_cache_read else request.token_ids
        match = self._cache.peek_match(known, request.namespace)
        if self._fits(request, match):
            return match
        whole = self._cache.floor_match(match)
        return whole if self._fits(request, whole) else None

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        headroom = self._headroom(request, match)
        room = max(request.num_tokens + 1, _grown(request, headroom))
        return self._cache.can_admit(
            match,
            room if self._running else request.num_tokens + 1,
            reserve_blocks=self._reserve(headroom),
            chunk_tokens=self._chunk_tokens,
        )

    def started(self, request: Request) -> None:
        """``request`` runs now: it grows like the others."""
        self._running.append(request)
        for headroom in self._reserves:
            self._reserves[headroom] += growth_blocks(request, headroom, self._cache)

    def _headroom(self, request: Request, match: PrefixMatch) -> int:
        if request.num_preemptions == 0:
            return self._cache.config.block_size
        again = request.num_tokens - match.num_tokens
        return max(self._cache.config.block_size, again // RETURN_SHARE)

    def _reserve(self, headroom: int) -> int:
        if headroom not in self._reserves:
            self._reserves[headroom] = sum(
                growth_blocks(request, headroom, self._cache) for request in self._running
            )
        return self._reserves[headroom]
