"""Figures, intervals and verdicts from made-up scores."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pagemill.bench.quality.bars import BARS, Bars, Estimate, bars_of, judge
from pagemill.bench.quality.scores import QuestionScore, figures, wilson
from pagemill.runtime.compare import TokenScores


def score(
    kl: list[float],
    *,
    context: str = "c",
    flip: bool = False,
    right: bool = True,
    margin: float = 1,
) -> QuestionScore:
    number = len(kl)
    no, yes = np.zeros(number, bool), np.ones(number, bool)
    tokens = TokenScores(
        kl=np.array(kl),
        flip=yes if flip else no,
        reference_right=yes,
        right=yes if right else no,
        margin=np.full(number, float(margin)),
        reference_nll=np.full(number, math.log(2.0)),
        nll=np.full(number, math.log(4.0)),
    )
    return QuestionScore(context, 1024, "kvlist", 0.5, tokens, 10, 10)


def test_means_and_shares() -> None:
    found = figures([score([0.1, 0.3]), score([0.2], flip=True, right=False)], 0)
    assert found.kl.value == pytest.approx(0.2) and found.num_tokens == 3
    assert found.flips.value == pytest.approx(1 / 3)
    assert found.exact == 0.5 and found.reference_exact == 1
    assert found.recovery.value == 0.5 and found.num_recoverable == 2
    assert found.ppl == pytest.approx(4) and found.reference_ppl == pytest.approx(2)
    assert found.context_bytes == 20


def test_near_ties_count_for_kl_alone() -> None:
    found = figures([score([0.1]), score([0.5], flip=True, right=False, margin=0.1)], 0)
    assert found.kl.value == pytest.approx(0.3)
    assert found.flips.value == 0 and found.num_recoverable == 1


def test_the_99th_percentile() -> None:
    """The smallest value that 99 % of the tokens do not exceed: of 100 the second largest."""
    kl = [float(i) for i in range(1, 101)]
    assert figures([score([x]) for x in kl], 0).kl_p99.value == 99
    assert figures([score(kl * 2)], 0).kl_p99.value == 99
    assert figures([score([1.0, 7.0])], 0).kl_p99.value == 7


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng, hits = np.random.default_rng(5), 0
    for _ in range(100):
        drawn = [
            score(list(rng.exponential(size=4)), context=str(c))
            for c in range(12)
            for _ in range(6)
        ]
        found = figures(drawn, 1).kl
        assert found.low < found.value < found.high
        hits += found.low < 1 < found.high
    assert hits >= 88


def test_contexts_that_differ_widen_the_interval() -> None:
    """Questions of one context are not independent: the draw of contexts shows it."""
    together = [score([float(c)] * 5, context=str(c)) for c in range(8) for _ in range(9)]
    apart = [score([float(i % 8)] * 5, context="one") for i in range(72)]
    wide, narrow = figures(together, 0).kl, figures(apart, 0).kl
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_formats_are_drawn_alike() -> None:
    """Twice the KL gives twice the bounds: the draws are the same."""
    rng = np.random.default_rng(3)
    one = [score(list(rng.exponential(size=3)), context=str(i % 4)) for i in range(30)]
    two = [replace(s, tokens=replace(s.tokens, kl=2 * s.tokens.kl)) for s in one]
    a, b = figures(one, 7), figures(two, 7)
    assert b.kl.high == pytest.approx(2 * a.kl.high)
    assert b.kl_p99.low == pytest.approx(2 * a.kl_p99.low)


def test_infinite_and_missing_kl_count_as_very_large() -> None:
    found = figures([score([math.inf, math.nan]), score([0.0])], 0)
    assert found.kl.value > 1e5 and math.isfinite(found.kl.high)


def test_wilson_is_the_published_interval() -> None:
    """10 of 10: 0.7225 (Brown, Cai and DasGupta 2001); 0 of 0 is nothing."""
    assert wilson(10, 10).low == pytest.approx(0.7225, abs=1e-4)
    found = wilson(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert math.isnan(wilson(0, 0).value)


# ---------------------------------------------------------------- verdicts

LIMITS = Bars(0.01, 0.1, 0.02, 0.03)


def at(low: float, high: float) -> dict[str, Estimate]:
    return {"kl": Estimate((low + high) / 2, low, high), "flips": Estimate(0, 0, 0)}


@pytest.mark.parametrize(
    ("low", "high", "tokens", "accuracy", "word"),
    [
        (0.001, 0.009, 1500, 0.8, "pass"),
        (0.001, 0.011, 1500, 0.8, "fail"),
        (0.011, 0.012, 1500, 0.8, "fail"),
        (0.001, 0.009, 1499, 0.8, "undecided"),
        (0.001, 0.009, 1500, 0.79, "undecided"),
        (0.001, 0.011, 100, 1.0, "undecided"),
        (0.011, 0.012, 100, 1.0, "fail"),
        (0.011, 0.012, 1500, 0.5, "fail"),
        (math.nan, math.nan, 1500, 1.0, "undecided"),
    ],
)
def test_verdicts(low: float, high: float, tokens: int, accuracy: float, word: str) -> None:
    verdict = judge(at(low, high), LIMITS, tokens, accuracy)
    assert verdict.word == word and bool(verdict.why) == (word != "pass")


def test_bars_of_modes() -> None:
    assert bars_of("i8", "cascade") == Bars(0.003, 0.04, 0.01, 0.005)
    assert bars_of("bf16", "cascade") == bars_of("i8", "cascade")
    assert bars_of("k8v4", "store").kl == pytest.approx(0.006 / 5)
    assert bars_of("i4c", "store").kl_p99 == pytest.approx(0.15)
    assert set(BARS) >= {"bf16", "i8", "f8", "k8v4", "i4c"}
