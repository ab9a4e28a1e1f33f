"""Log-probabilities of tokens, from raw logits: before bias, penalties and temperature."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagemill.core.step import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int | Sequence[int]
) -> list[TokenLogprobs]:
    """Of each row of ``logits`` float32 [n, V] the token of ``token_ids`` [n], and the best others.

    ``num_top``: how many of the best to list, one number for all rows or one a row. Rank 1 is the
    best; equal logits share the better rank.
    """
    counts = [num_top] * len(token_ids) if isinstance(num_top, int) else list(num_top)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    totals = logits.double().logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, ids)
    ranks = ((logits > chosen).sum(dim=1) + 1).tolist()
    own = (chosen.double() - totals)[:, 0].tolist()
    width = min(max(counts, default=0), logits.shape[1])
    values, best = logits.topk(width, dim=1)
    alternatives = (values.double() - totals).tolist()
    best_ids = best.tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=own[i],
            rank=ranks[i],
            top=tuple(zip(best_ids[i][:count], alternatives[i][:count], strict=True)),
        )
        for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]
