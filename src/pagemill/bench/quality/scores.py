"""From scored tokens to figures with intervals.

Intervals are the middle 95 % of a paired bootstrap in two stages: contexts are drawn with
replacement, then as many questions of each. All formats are drawn alike. Recovery, a share of few
questions, has Wilson's interval.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagemill.bench.quality.bars import MARGIN, Estimate

if TYPE_CHECKING:
    from pagemill.runtime.compare import TokenScores

Floats = NDArray[np.float64]
NUM_DRAWS = 1000
P99 = 0.99
LARGEST_KL = 1e6
"""Stands for infinity, so that means exist."""
Z95 = 1.959964
TEXT_UNIT = 16
"""Tokens of a continuation that are drawn together."""


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """The scored answer of one question. ``context`` names the prefill. ``context_bytes`` were read
    of it for this question, ``expected_bytes`` should have been."""

    context: str
    length: int
    task: str
    depth: float
    tokens: "TokenScores"
    context_bytes: int
    expected_bytes: int

    @property
    def has_margin(self) -> bool:
        return bool((self.tokens.margin > MARGIN).all())

    @property
    def is_reference_exact(self) -> bool:
        return bool(self.tokens.reference_right.all())

    @property
    def is_exact(self) -> bool:
        return bool(self.tokens.right.all())


@dataclass(frozen=True, slots=True)
class Figures:
    """What was found over some questions. ``recovery`` counts ``num_recoverable`` of them: right in
    the reference, with a margin at every token."""

    num_contexts: int
    num_questions: int
    num_tokens: int
    kl: Estimate
    kl_p99: Estimate
    flips: Estimate
    exact: float
    reference_exact: float
    recovery: Estimate
    num_recoverable: int
    accuracy: float
    reference_accuracy: float
    ppl: float
    reference_ppl: float
    context_bytes: int


def figures(scores: Sequence[QuestionScore], seed: int) -> Figures:
    """Figures of at least one question."""
    units = [unit for score in scores for unit in _units(score)]
    weights = _draws(units, seed)
    kl = [np.minimum(np.nan_to_num(u.tokens.kl, nan=LARGEST_KL), LARGEST_KL) for u in units]
    sizes = np.array([len(k) for k in kl], dtype=np.float64)
    counted = sizes * [unit.has_margin for unit in units]
    flips = np.array([unit.tokens.flip.sum() for unit in units]) * (counted > 0)
    recoverable = [s for s in scores if s.is_reference_exact and s.has_margin]
    tokens = [score.tokens for score in scores]
    return Figures(
        num_contexts=len({score.context for score in scores}),
        num_questions=len(scores),
        num_tokens=int(sizes.sum()),
        kl=_ratio(np.array([k.sum() for k in kl]), sizes, weights),
        kl_p99=_p99(kl, weights),
        flips=_ratio(flips, counted, weights),
        exact=_mean([score.is_exact for score in scores]),
        reference_exact=_mean([score.is_reference_exact for score in scores]),
        recovery=wilson(sum(s.is_exact for s in recoverable), len(recoverable)),
        num_recoverable=len(recoverable),
        accuracy=_mean(np.concatenate([t.right for t in tokens])),
        reference_accuracy=_mean(np.concatenate([t.reference_right for t in tokens])),
        ppl=_perplexity([t.nll for t in tokens]),
        reference_ppl=_perplexity([t.reference_nll for t in tokens]),
        context_bytes=sum(score.context_bytes for score in scores),
    )


def wilson(num_hits: int, number: int) -> Estimate:
    """A share and Wilson's 95 % interval (Wilson 1927). NaN of nothing."""
    if number == 0:
        return Estimate(math.nan, math.nan, math.nan)
    share, z2 = num_hits / number, Z95**2
    middle = (share + z2 / (2 * number)) / (1 + z2 / number)
    half = Z95 / (1 + z2 / number) * math.sqrt(share * (1 - share) / number + z2 / (4 * number**2))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def _units(score: QuestionScore) -> list[QuestionScore]:
    """What is drawn as one: a question, or a short run of a continuation."""
    number = len(score.tokens.kl)
    if score.task != "text":
        return [score]
    parts = [score.tokens.part(i, i + TEXT_UNIT) for i in range(0, number, TEXT_UNIT)]
    return [
        QuestionScore(score.context, score.length, score.task, score.depth, part, 0, 0)
        for part in parts
    ]


def _draws(units: Sequence[QuestionScore], seed: int) -> Floats:
    """How often each unit is drawn: [NUM_DRAWS, units]. The same for equal contexts and units."""
    names = list(dict.fromkeys(unit.context for unit in units))
    generator = np.random.default_rng([seed, zlib.crc32("\0".join(names).encode())])
    times = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), NUM_DRAWS)
    drawn = np.zeros((NUM_DRAWS, len(units)))
    for i, name in enumerate(names):
        own = [j for j, unit in enumerate(units) if unit.context == name]
        drawn[:, own] = generator.multinomial(
            times[:, i] * len(own), np.full(len(own), 1 / len(own))
        )
    return drawn


def _ratio(above: Floats, below: Floats, weights: Floats) -> Estimate:
    if below.sum() == 0:
        return Estimate(math.nan, math.nan, math.nan)
    drawn_below = weights @ below
    kept = drawn_below > 0
    drawn = (weights @ above)[kept] / drawn_below[kept]
    return _interval(float(above.sum() / below.sum()), drawn)


def _p99(kl: Sequence[Floats], weights: Floats) -> Estimate:
    """The smallest value that at least 99 % of the tokens do not exceed."""
    values = np.concatenate(kl)
    order = np.argsort(values, kind="stable")
    unit_of = np.repeat(np.arange(len(kl)), [len(k) for k in kl])[order]
    values = values[order]
    drawn = np.empty(len(weights))
    for i, row in enumerate(weights):
        drawn[i] = values[_place(row[unit_of].cumsum())]
    return _interval(float(values[_place(np.arange(1.0, len(values) + 1))]), drawn)


def _place(seen: Floats) -> int:
    return int(np.searchsorted(seen, P99 * seen[-1] - 1e-9))


def _interval(value: float, drawn: Floats) -> Estimate:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def _mean(values: Sequence[bool] | NDArray[np.bool_]) -> float:
    return float(np.mean(values))


def _perplexity(nll: Sequence[Floats]) -> float:
    mean = float(np.mean(np.concatenate(nll)))
    return math.exp(mean) if mean < 700 else math.inf
