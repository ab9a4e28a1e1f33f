"""Scores -> rows, verdicts, controls: what the report, the JSON and the picture show."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagemill.bench.quality.bars import (
    MIN_ACCURACY,
    Bars,
    Estimate,
    Verdict,
    bars_of,
    judge,
)
from pagemill.bench.quality.measure import Measured, QualityConfig
from pagemill.bench.quality.scores import Figures, QuestionScore, figures
from pagemill.bench.quality.tasks import TASKS
from pagemill.core.errors import ControlError

NUM_DEPTHS = 5
ALL = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """One format and mode over one task and length; ``task`` and ``length`` are ``all`` and 0 in
    the row of the verdict, whose ``text_kl`` and ``ppl`` are those of the continuations."""

    kv_format: str
    mode: str
    task: str
    length: int
    found: Figures
    verdict: Verdict
    text: Figures | None = None

    def as_json(self) -> dict[str, Any]:
        """Flat: the names of the issue first, ends of intervals beside them."""
        found, ppl = self.found, self.text or self.found
        row: dict[str, Any] = {
            "format": self.kv_format,
            "task": self.task,
            "length": self.length or ALL,
            "mode": self.mode,
            "kl": found.kl.value,
            "kl_p99": found.kl_p99.value,
            "flips": found.flips.value,
            "exact": found.exact,
            "recovery": found.recovery.value,
            "ppl": ppl.ppl,
            "verdict": self.verdict.word,
            "why": self.verdict.why,
            "text_kl": self.text.kl.value if self.text else None,
            "text_kl_high": self.text.kl.high if self.text else None,
            "reference_ppl": ppl.reference_ppl,
            "reference_exact": found.reference_exact,
            "reference_accuracy": found.reference_accuracy,
            "accuracy": found.accuracy,
            "num_tokens": found.num_tokens,
            "num_questions": found.num_questions,
            "num_contexts": found.num_contexts,
            "num_recoverable": found.num_recoverable,
            "context_bytes": found.context_bytes,
        }
        for name in ("kl", "kl_p99", "flips", "recovery"):
            estimate: Estimate = getattr(found, name)
            row |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        return {key: _plain(value) for key, value in row.items()}


@dataclass(frozen=True, slots=True)
class DepthRow:
    """Answers that stood in one part of the contexts: part ``depth`` of NUM_DEPTHS."""

    kv_format: str
    mode: str
    length: int
    depth: int
    num_tokens: int
    accuracy: float
    reference_accuracy: float
    kl: float


@dataclass(frozen=True, slots=True)
class Results:
    """``totals`` has the verdicts, one row a format and mode; ``left_out`` names (task, length)
    that the model itself cannot do. ``self_kl`` is 0 and ``poisoned`` all *fail*: a control that
    fails raises."""

    rows: tuple[Row, ...]
    totals: tuple[Row, ...]
    depths: tuple[DepthRow, ...]
    left_out: tuple[tuple[str, int], ...]
    self_kl: float
    poisoned: dict[str, Verdict]

    @property
    def has_failure(self) -> bool:
        return any(row.verdict.word == "fail" for row in self.totals)


def results(config: QualityConfig, measured: Measured) -> Results:
    """Raises ControlError where a control failed: then no figure of the run means anything."""
    self_kl = max(float(score.tokens.kl.max()) for score in measured.self_scores)
    if self_kl != 0:
        raise ControlError(f"the reference against itself has a KL of {self_kl:.3g}, not 0")
    for (kv_format, mode), scores in measured.scores.items():
        _check_bytes(kv_format, mode, scores)
    poisoned = {
        name: _poisoned(name, scores, config.seed) for name, scores in measured.poisoned.items()
    }
    left_out = _left_out(next(iter(measured.scores.values())))
    rows, totals, depths = [], [], []
    for (kv_format, mode), scores in measured.scores.items():
        bars = bars_of(kv_format, mode)
        for task, length in _cells(scores):
            own = [s for s in scores if s.task == task and s.length == length]
            rows.append(_row(kv_format, mode, task, length, own, bars, config.seed))
        totals.append(_total(kv_format, mode, scores, set(left_out), bars, config.seed))
        depths += _depths(kv_format, mode, scores)
    return Results(tuple(rows), tuple(totals), tuple(depths), left_out, self_kl, poisoned)


def _check_bytes(kv_format: str, mode: str, scores: Sequence[QuestionScore]) -> None:
    for score in scores:
        if score.context_bytes != score.expected_bytes:
            raise ControlError(
                f"{kv_format} {mode}, {score.context}: a question read {score.context_bytes} bytes"
                f" of its context; context x format bytes are {score.expected_bytes}"
            )


def _poisoned(kv_format: str, scores: Sequence[QuestionScore], seed: int) -> Verdict:
    """The verdict on the damaged format, whose sample is small: it must be sure all the same."""
    found = figures([score for score in scores if score.task != "text"], seed)
    bars = bars_of(kv_format, "cascade")
    verdict = judge({"kl": found.kl, "kl_p99": found.kl_p99}, bars, found.num_tokens, 1.0)
    if verdict.word != "fail":
        raise ControlError(
            f"{kv_format} with damaged blocks was not noticed (KL {found.kl.value:.2g}): this model"
            " does not use its context, so that no verdict on a format can be given"
        )
    return verdict


def _cells(scores: Sequence[QuestionScore]) -> list[tuple[str, int]]:
    found = {(score.task, score.length) for score in scores}
    return sorted(found, key=lambda cell: (TASKS.index(cell[0]), cell[1]))


def _left_out(scores: Sequence[QuestionScore]) -> tuple[tuple[str, int], ...]:
    """Tasks and lengths at which the reference gets too few answer tokens right."""
    found = []
    for task, length in _cells(scores):
        right = [s.tokens.reference_right for s in scores if (s.task, s.length) == (task, length)]
        share = sum(int(r.sum()) for r in right) / sum(map(len, right))
        if task != "text" and share < MIN_ACCURACY:
            found.append((task, length))
    return tuple(found)


def _row(
    kv_format: str,
    mode: str,
    task: str,
    length: int,
    scores: Sequence[QuestionScore],
    bars: Bars,
    seed: int,
) -> Row:
    found = figures(scores, seed)
    if task == "text":
        verdict = judge({"text_kl": found.kl}, bars, found.num_tokens, 1.0)
    else:
        verdict = judge(_judged(found), bars, found.num_tokens, found.reference_accuracy)
    return Row(kv_format, mode, task, length, found, verdict)


def _judged(found: Figures) -> dict[str, Estimate]:
    return {"kl": found.kl, "kl_p99": found.kl_p99, "flips": found.flips}


def _total(
    kv_format: str,
    mode: str,
    scores: Sequence[QuestionScore],
    left_out: set[tuple[str, int]],
    bars: Bars,
    seed: int,
) -> Row:
    """All tasks that the model can do; all answers, where it can do none."""
    answers = [score for score in scores if score.task != "text"]
    counted = [score for score in answers if (score.task, score.length) not in left_out] or answers
    texts = [score for score in scores if score.task == "text"]
    text = figures(texts, seed) if texts else None
    found = figures(counted, seed)
    judged = _judged(found) | ({"text_kl": text.kl} if text else {})
    verdict = judge(judged, bars, found.num_tokens, found.reference_accuracy)
    return Row(kv_format, mode, ALL, 0, found, verdict, text)


def _depths(kv_format: str, mode: str, scores: Sequence[QuestionScore]) -> list[DepthRow]:
    rows = []
    for length in sorted({score.length for score in scores}):
        for depth in range(NUM_DEPTHS):
            own = [
                score.tokens
                for score in scores
                if score.task != "text"
                and score.length == length
                and min(int(score.depth * NUM_DEPTHS), NUM_DEPTHS - 1) == depth
            ]
            number = sum(len(tokens.kl) for tokens in own)
            if number:
                right = sum(int(tokens.right.sum()) for tokens in own)
                expected = sum(int(tokens.reference_right.sum()) for tokens in own)
                kl = sum(float(tokens.kl.sum()) for tokens in own)
                shares = (right / number, expected / number, kl / number)
                rows.append(DepthRow(kv_format, mode, length, depth, number, *shares))
    return rows


def as_json(config: QualityConfig, measured: Measured, found: Results) -> dict[str, Any]:
    """Everything a program may want."""
    return {
        "model": measured.model,
        "texts": measured.texts,
        **{key: value for key, value in asdict(config).items() if key != "model"},
        "rows": [row.as_json() for row in (*found.totals, *found.rows)],
        "depths": [_flat(asdict(row)) for row in found.depths],
        "left_out": [{"task": task, "length": length} for task, length in found.left_out],
        "controls": {
            "self_kl": found.self_kl,
            "poisoned": {name: verdict.word for name, verdict in found.poisoned.items()},
            "context_bytes": "as expected",
        },
        "bars": {
            f"{row.kv_format} {row.mode}": asdict(bars_of(row.kv_format, row.mode))
            for row in found.totals
        },
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    row["format"] = row.pop("kv_format")
    row["depth"] = (row["depth"] + 0.5) / NUM_DEPTHS
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
