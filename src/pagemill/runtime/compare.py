"""Next-token distributions of two runs of the same tokens, token by token."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.models.decoder import Decoder

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SLAB_VALUES = 1 << 23
"""Logits are made for as many rows at a time as give so many values."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One entry per answer token: the run against the reference, both judged on the same tokens.

    ``kl`` KL(reference || run) in nats. ``flip``: their best tokens differ. ``reference_right`` and
    ``right``: the best token is the answer's. ``margin``: the reference's best log-probability less
    its second. ``reference_nll`` and ``nll``: minus the log-probability of the answer's token.
    """

    kl: Floats
    flip: Bools
    reference_right: Bools
    right: Bools
    margin: Floats
    reference_nll: Floats
    nll: Floats

    def part(self, first: int, last: int) -> "TokenScores":
        """Entries [first, last)."""
        return TokenScores(*(getattr(self, name)[first:last] for name in self.__slots__))


@torch.inference_mode()
def compare(decoder: Decoder, reference: Tensor, run: Tensor, targets: list[int]) -> TokenScores:
    """Scores of hidden states ``reference`` and ``run``, float32 [T, N], which predict ``targets``.

    Log-probabilities in float32. The same hidden states give a KL of exactly 0.
    """
    assert len(reference) == len(run) == len(targets) > 0
    wanted = torch.tensor(targets)
    rows = max(1, SLAB_VALUES // decoder.config.vocab_size)
    slabs = [
        _compare_slab(decoder, *slab)
        for slab in zip(*(torch.split(x, rows) for x in (reference, run, wanted)), strict=True)
    ]
    kl, flip, expected, right, margin, p_nll, q_nll = (
        torch.cat(column).numpy() for column in zip(*slabs, strict=True)
    )
    floats = (x.astype(np.float64) for x in (kl, margin, p_nll, q_nll))
    kl, margin, p_nll, q_nll = floats
    return TokenScores(kl, flip, expected, right, margin, p_nll, q_nll)


def _compare_slab(
    decoder: Decoder, reference: Tensor, run: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    log_p = decoder.logits(reference).log_softmax(dim=-1)
    log_q = decoder.logits(run).log_softmax(dim=-1)
    best = log_p.topk(2, dim=-1)
    run_best = log_q.argmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)
    kl = torch.where(torch.isfinite(log_q).all(dim=-1), kl, torch.inf)
    at = targets[:, None]
    return (
        kl,
        best.indices[:, 0] != run_best,
        best.indices[:, 0] == targets,
        run_best == targets,
        best.values[:, 0] - best.values[:, 1],
        -log_p.gather(1, at)[:, 0],
        -log_q.gather(1, at)[:, 0],
    )
