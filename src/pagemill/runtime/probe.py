"""Do the keys of a model break a number format? Looked at once, on the first real prefill.

Softmax sees of a key only what differs between tokens: the same vector added to all keys of a head
changes nothing. So a key's error is measured against norm(K - mean), not against norm(K). Two
figures a head (T tokens, after the constant vector of the head was taken off):

    offset factor     norm(K) / norm(K - mean)          over 3: a constant part is left, which eats
                                                        the bits of the format
    relative error    norm(decoded - K) / norm(K - mean)   8 bit over .03, i4c and f8 over .08: bad

(docs/quality.md, "The outlier probe")
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MIN_TOKENS = 64
"""Fewer tokens say little about the spread of keys."""
MAX_OFFSET_FACTOR = 3.0
MAX_ERROR = {"i8": 0.03, "k8v4": 0.03, "f8": 0.08, "i4c": 0.08}
"""Other formats are never bad: there is nothing below them to fall back to."""
FALL_BACK = {"i4c": "k8v4", "k8v4": "i8", "f8": "i8", "i8": "bf16"}
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class HeadProbe:
    """One KV head of one layer."""

    layer: int
    head: int
    offset_factor: float
    error: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All heads. A figure that is no number counts as beyond its limit."""

    kv_format: str
    heads: tuple[HeadProbe, ...]

    @property
    def offset_heads(self) -> tuple[HeadProbe, ...]:
        """Heads with a constant part that centering did not take off."""
        return tuple(h for h in self.heads if not h.offset_factor <= MAX_OFFSET_FACTOR)

    @property
    def bad_heads(self) -> tuple[HeadProbe, ...]:
        """Heads whose keys the format damages too much."""
        limit = MAX_ERROR.get(self.kv_format, math.inf)
        return tuple(h for h in self.heads if not h.error <= limit) if limit < math.inf else ()

    @property
    def fall_back(self) -> str | None:
        """The format to take instead; None where this one holds or nothing stands below it."""
        return FALL_BACK.get(self.kv_format) if self.bad_heads else None

    def lines(self) -> tuple[str, ...]:
        """What a person must hear; empty where all is well."""
        found = []
        if self.bad_heads:
            worst = max(self.bad_heads, key=lambda head: _rank(head.error))
            found.append(
                f"KV format {self.kv_format} damages the keys of {len(self.bad_heads)} of"
                f" {len(self.heads)} heads: relative error up to {worst.error:.3f}"
                f" ({MAX_ERROR[self.kv_format]} is allowed) in {_names(self.bad_heads)}"
            )
        if self.offset_heads:
            worst = max(self.offset_heads, key=lambda head: _rank(head.offset_factor))
            found.append(
                f"keys of {len(self.offset_heads)} of {len(self.heads)} heads have a constant part"
                f" up to {worst.offset_factor:.1f} times what differs between tokens, in"
                f" {_names(self.offset_heads)}: number formats lose precision there"
            )
        return tuple(found)


def probe_layer(layer: int, keys: Tensor, decoded: Tensor) -> tuple[HeadProbe, ...]:
    """One entry a head of ``keys`` float [T, K, D], centered, as they were before they were coded,
    and ``decoded`` [T, K, D], as a reader of the cache gets them (on the same basis: where the
    format rotates, rotated back). ValueError where the shapes do not fit."""
    if keys.dim() != 3 or keys.shape != decoded.shape or len(keys) == 0:
        raise ValueError(
            f"keys {list(keys.shape)}, decoded {list(decoded.shape)}: both must be [T, K, D]"
        )
    exact = keys.double()
    spread = (exact - exact.mean(dim=0)).square().sum(dim=(0, 2)).sqrt()
    norm = exact.square().sum(dim=(0, 2)).sqrt()
    error = (decoded.double() - exact).square().sum(dim=(0, 2)).sqrt()
    return tuple(
        HeadProbe(layer, head, _share(norm[head], spread[head]), _share(error[head], spread[head]))
        for head in range(keys.shape[1])
    )


def make_report(kv_format: str, layers: Sequence[tuple[HeadProbe, ...]]) -> ProbeReport:
    """The report of all layers that hold ``kv_format``."""
    return ProbeReport(kv_format, tuple(head for layer in layers for head in layer))


def _share(above: Tensor, below: Tensor) -> float:
    """``above`` / ``below``; nothing of nothing is 0."""
    part, whole = float(above), float(below)
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _names(heads: Sequence[HeadProbe]) -> str:
    named = ", ".join(f"layer {head.layer} head {head.head}" for head in heads[:MAX_NAMED])
    more = len(heads) - MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
