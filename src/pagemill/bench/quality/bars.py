"""What a format must keep to, and the verdict. The bars are upper 95 % bounds in cascade mode.

    i8, bf16   8 bits cost nearly nothing where keys are centered and rotated
    k8v4       8-bit keys, 4-bit values
    f8         3 bits of mantissa
    i4c        4-bit keys and values

In store mode the context was computed exactly, so that errors do not build up from layer to layer:
a fifth of each bar holds there, half of it for i4c.
"""

import math
from dataclasses import dataclass

MIN_TOKENS = 1500
MIN_ACCURACY = 0.8
MARGIN = 0.2
"""Flips and recovery count where the reference's best is so far ahead at every answer token."""
STORE_SHARE = 0.2
STORE_SHARES = {"i4c": 0.5}


@dataclass(frozen=True, slots=True)
class Bars:
    """Most that is allowed: KL in nats over answer tokens, its 99th percentile, the share of
    answer tokens with another best token, KL over the continuation of text."""

    kl: float
    kl_p99: float
    flips: float
    text_kl: float

    def times(self, share: float) -> "Bars":
        return Bars(self.kl * share, self.kl_p99 * share, self.flips * share, self.text_kl * share)


_EIGHT_BIT = Bars(0.003, 0.04, 0.01, 0.005)
BARS = {
    "fp32": _EIGHT_BIT,
    "bf16": _EIGHT_BIT,
    "i8": _EIGHT_BIT,
    "k8v4": Bars(0.006, 0.08, 0.015, 0.012),
    "f8": Bars(0.015, 0.3, 0.03, 0.03),
    "i4c": Bars(0.012, 0.3, 0.03, 0.015),
}


def bars_of(kv_format: str, mode: str) -> Bars:
    """Bars of a format in ``cascade`` or ``store`` mode."""
    bars = BARS[kv_format]
    return bars if mode == "cascade" else bars.times(STORE_SHARES.get(kv_format, STORE_SHARE))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its 95 % interval. NaN where there was nothing to count."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """``pass``, ``fail`` or ``undecided``, and why it is not the first."""

    word: str
    why: str = ""


def judge(figures: dict[str, Estimate], bars: Bars, num_tokens: int, accuracy: float) -> Verdict:
    """The verdict on the figures named as in Bars; one that is missing is not judged.

    Where the sample is too small or the model too often wrong, a format fails only when a whole
    interval lies beyond its bar; else nothing is decided.
    """
    limits = {name: getattr(bars, name) for name in figures}
    surely = [name for name, limit in limits.items() if figures[name].low > limit]
    if surely:
        return Verdict("fail", _words(surely, figures, limits))
    if num_tokens < MIN_TOKENS:
        return Verdict("undecided", f"{num_tokens} scored tokens, {MIN_TOKENS} are needed")
    if not accuracy >= MIN_ACCURACY:
        return Verdict("undecided", f"the model itself gets {accuracy:.0%} of the tokens right")
    empty = [name for name in limits if math.isnan(figures[name].value)]
    if empty:
        return Verdict("undecided", f"nothing to count for {', '.join(empty)}")
    beyond = [name for name, limit in limits.items() if not figures[name].high <= limit]
    if beyond:
        return Verdict("fail", _words(beyond, figures, limits))
    return Verdict("pass")


def _words(names: list[str], figures: dict[str, Estimate], limits: dict[str, float]) -> str:
    return ", ".join(
        f"{name} up to {figures[name].high:.2g} > {limits[name]:.2g}" for name in names
    )
