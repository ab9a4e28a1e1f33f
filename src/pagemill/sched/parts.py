"""The part of a request that a step computes, as the executor sees it."""

from collections.abc import Sequence
from dataclasses import replace

from pagemill.cache.manager import CacheManager
from pagemill.core.layers import TOKEN_GROUP
from pagemill.core.request import Request
from pagemill.core.step import SequencePlan, SharedRun, TokenLogprobs
from pagemill.core.types import GroupId

MIN_SHARED_TOKENS = 512
"""Shorter runs are not worth a plan of their own."""


def sequence_plan(request: Request, count: int) -> SequencePlan:
    """Tokens [computed, computed + count) of a running request.

    It samples only where the part reaches the last known token.
    """
    ids, start = request.token_ids, request.num_computed_tokens
    end = start + count
    samples = end == request.num_tokens and request.stop.max_tokens > 0
    scores = (
        request.sampling.prompt_logprobs is not None
        and start < request.num_prompt_tokens
        and request.num_output_tokens == 0
    )
    assert request.table_id is not None, "only a running request is planned"
    return SequencePlan(
        sequence_id=request.sequence_id,
        table_id=request.table_id,
        start=start,
        count=count,
        token_ids=ids[start:end],
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling if samples else None,
        history=ids[:] if samples and request.sampling.needs_history else None,
        prompt_logprobs=request.sampling.prompt_logprobs if scores else None,
        next_prompt_token_id=ids[end] if scores and end < len(ids) else None,
    )


def shared_runs(
    sequences: Sequence[SequencePlan], cache: CacheManager
) -> tuple[tuple[SharedRun, ...], ...]:
    """The long runs of blocks that sequences share which compute one token in this step: attention
    reads them once for all. One entry a layer group; nothing where nobody shares."""
    places = [i for i, part in enumerate(sequences) if part.count == 1]
    if len(places) < 2:
        return ()
    tables = [sequences[i].table_id for i in places]
    least = MIN_SHARED_TOKENS // cache.config.block_size
    found = []
    for index, group in enumerate(cache.config.groups):
        runs = cache.shared_runs(tables, GroupId(index)) if group.window is None else ()
        found.append(
            tuple(
                replace(run, members=tuple(places[i] for i in run.members))
                for run in runs
                if run.num_blocks >= least
            )
        )
    return tuple(found) if any(found) else ()


def num_kept_tokens(request: Request, cache: CacheManager) -> int:
    """Computed tokens whose KV lies in the blocks: all, or those of whole groups where the KV
    format codes these (the rest is in the tail slot, which goes when the table is released)."""
    computed = request.num_computed_tokens
    whole = computed // TOKEN_GROUP * TOKEN_GROUP
    return whole if cache.config.codes_whole_groups else computed


def fresh_scores(
    request: Request, part: SequencePlan, scores: tuple[TokenLogprobs, ...]
) -> tuple[TokenLogprobs, ...]:
    """The scores of a part that were not reported yet: a preempted prompt is computed again.

        1 ........ num_scored_tokens ........ part.start + len(scores)      prompt tokens
        |  reported  |  fresh                |

    Score i of a part belongs to the prompt token part.start + 1 + i.
    """
    fresh = scores[max(0, request.num_scored_tokens - part.start) :]
    request.num_scored_tokens += len(fresh)
    return fresh
