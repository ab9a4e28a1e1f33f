"""Choosing the next token, and log-probabilities.

Order of the steps, as in vLLM's sampler: log-probabilities from the raw logits; logit bias;
repetition penalty (prompt and output), frequency and presence penalty (output only); temperature;
min_p; top_k; top_p over what is left. Temperature 0 takes the largest logit, of equals the first,
and so does every temperature below 1e-5 (as in vLLM): there only differences under 4e-4 between
logits could matter, which is less than they are worth, and in float32 the quotients overflow.

Randomness: one uniform number a token, a function of (seed, position) alone, and the inverse of the
distribution function in float64. So a seeded request gives the same tokens in any batch and after
any preemption.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill.core.request import SamplingParams
from pagemill.core.step import TokenLogprobs
from pagemill.core.types import IntBuffer, SequenceId
from pagemill.kernels.logprobs import token_logprobs

__all__ = ["Sample", "SampleRow", "Sampler", "token_logprobs"]

_CANDIDATES = (512, 8192)
"""So many of the largest logits top_p looks at first; a row that needs more is sorted whole."""
_GREEDY_BELOW = 1e-5
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is for. ``position``: index in the sequence of the token to choose.

    ``history`` is the whole sequence so far, its first ``num_prompt_tokens`` the prompt; it is
    needed where ``params.needs_history``.
    """

    sequence_id: SequenceId
    params: SamplingParams
    position: int
    num_prompt_tokens: int = 0
    history: IntBuffer | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The chosen token, or None and the reason in ``error``."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens. Holds a secret for requests without a seed, nothing of any sequence."""

    def __init__(self, vocab_size: int, secret: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._secret = secrets.randbits(64) if secret is None else secret

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
        """One ``Sample`` a row of ``logits`` float32 [S, V]. Bad rows do not touch the others."""
        assert logits.shape == (len(rows), self._vocab_size), "one row of logits a sequence"
        if not rows:
            return []
        changed = logits
        if any(row.params.logit_bias or row.params.needs_history for row in rows):
            changed = logits.clone()
            for scores, row in zip(changed, rows, strict=True):
                _add_bias(scores, row.params)
                _penalize(scores, row)
        best, best_ids = changed.max(dim=1)
        tokens, usable = best_ids.tolist(), best.isfinite().tolist()
        drawn = [i for i, row in enumerate(rows) if _is_random(row.params) and usable[i]]
        if drawn:
            chosen = self._draw(changed[drawn], best[drawn], [rows[i] for i in drawn])
            for i, token in zip(drawn, chosen, strict=True):
                tokens[i] = token
        return _report(logits, rows, tokens, usable)

    def _draw(self, scores: Tensor, best: Tensor, rows: list[SampleRow]) -> list[int]:
        """A random token a row of ``scores`` [R, V], whose maxima are ``best`` [R]."""
        temperatures = torch.tensor([row.params.temperature for row in rows], device=scores.device)
        scaled = (scores - best[:, None]) / temperatures[:, None]
        uniforms = [self._uniform(row) for row in rows]
        tokens: list[int] = [0] * len(rows)
        plain = [i for i, row in enumerate(rows) if not _is_filtered(row.params)]
        if plain:
            chosen = _invert(scaled[plain].exp(), [uniforms[i] for i in plain])
            for i, token in zip(plain, chosen, strict=True):
                tokens[i] = token
        for i, row in enumerate(rows):
            if _is_filtered(row.params):
                tokens[i] = _draw_filtered(scaled[i], row.params, uniforms[i])
        return tokens

    def _uniform(self, row: SampleRow) -> float:
        """In [0, 1), with 53 bits."""
        if row.params.seed is None:
            key = _mix(self._secret ^ _mix(row.sequence_id))
        else:
            key = _mix(row.params.seed & _MASK)
        return (_mix(key + row.position) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """A 64-bit hash: the step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _add_bias(scores: Tensor, params: SamplingParams) -> None:
    known = [(token, bias) for token, bias in params.logit_bias if 0 <= token < len(scores)]
    if known:
        ids, biases = zip(*known, strict=True)
        scores[list(ids)] += torch.tensor(biases, device=scores.device)


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Penalties in place on one row [V]; every token counts once for repetition and presence."""
    params = row.params
    if not params.needs_history:
        return
    assert row.history is not None, "penalties need the tokens before"
    history = np.asarray(row.history).astype(np.int64)
    if params.repetition_penalty != 1.0:
        ids = torch.from_numpy(np.unique(history)).to(scores.device)
        seen, factor = scores[ids], params.repetition_penalty
        scores[ids] = torch.where(seen > 0, seen / factor, seen * factor)
    output, counts = np.unique(history[row.num_prompt_tokens :], return_counts=True)
    loss = counts * params.frequency_penalty + params.presence_penalty
    ids, losses = torch.from_numpy(output), torch.from_numpy(loss.astype(np.float32))
    scores[ids.to(scores.device)] -= losses.to(scores.device)


def _is_random(params: SamplingParams) -> bool:
    return params.temperature >= _GREEDY_BELOW


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _invert(weights: Tensor, uniforms: list[float]) -> list[int]:
    """For each row of ``weights`` [R, n] the first index whose running sum exceeds u * total."""
    sums = weights.double().cumsum(dim=1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=sums.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True)[:, 0]
    last = weights.shape[1] - 1  # rounding may push a point onto the total
    return [int(i) for i in found.clamp_(max=last).tolist()]


def _draw_filtered(scores: Tensor, params: SamplingParams, uniform: float) -> int:
    """A token of one row [V], whose largest value is 0, within min_p, then top_k, then top_p."""
    if params.min_p > 0.0:
        scores = scores.masked_fill(scores < math.log(params.min_p), -math.inf)
    if params.top_k <= 0 and params.top_p == 1.0:
        return _invert(scores.exp()[None], [uniform])[0]
    if params.top_k > 0:
        values, ids = scores.topk(min(params.top_k, len(scores)))
        sums = values.exp().double().cumsum(dim=0)
        mass = params.top_p * float(sums[-1])
    else:
        mass = params.top_p * float(scores.exp().double().sum())
        ids, sums = _likeliest(scores, mass)
    num_kept = int((sums < mass).sum()) + 1
    sums = sums[:num_kept]
    found = torch.searchsorted(sums, uniform * float(sums[-1]), right=True)
    return int(ids[min(int(found), len(sums) - 1)])


def _likeliest(scores: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Ids from the likeliest on and the running sums of their weights, up to ``mass`` or beyond."""
    for count in _CANDIDATES:
        if count < len(scores):
            values, ids = scores.topk(count)
            sums = values.exp().double().cumsum(dim=0)
            if float(sums[-1]) >= mass:
                return ids, sums
    values, ids = scores.sort(descending=True)
    return ids, values.exp().double().cumsum(dim=0)


def _report(
    logits: Tensor, rows: Sequence[SampleRow], tokens: list[int], usable: list[bool]
) -> list[Sample]:
    """Samples with log-probabilities where asked, errors where the logits are no numbers."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and usable[i]]
    found = {}
    if asked:
        counts = [rows[i].params.logprobs or 0 for i in asked]
        chosen = [tokens[i] for i in asked]
        found = dict(zip(asked, token_logprobs(logits[asked], chosen, counts), strict=True))
    return [
        Sample(token, found.get(i))
        if usable[i]
        else Sample(None, error="the model gave logits that are not finite (NaN or infinity)")
        for i, token in enumerate(tokens)
    ]
