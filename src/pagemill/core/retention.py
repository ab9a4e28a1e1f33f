"""How long the blocks of a request should stay in the cache after it."""

from dataclasses import dataclass

DEFAULT_BAND = 35
MAX_BAND = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """Eviction goes by band, and inside a band by rank: every block of a lower band goes first.

    While the lifetime ``ttl_ns`` runs, and it starts again at every hit, a block goes only when
    nothing else is left; a pinned one even after those. Neither keeps a request waiting.
    """

    band: int = DEFAULT_BAND
    ttl_ns: int | None = None
    is_pinned: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.band <= MAX_BAND and (self.ttl_ns is None or self.ttl_ns > 0)

    @property
    def is_default(self) -> bool:
        return self == KEEP_AS_USUAL


KEEP_AS_USUAL = Retention()
