"""Runs a model as the engine does - scheduler, cache, model runner - and keeps every logit."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagemill.cache.manager import CacheManager
from pagemill.core.clock import SystemClock
from pagemill.core.config import EngineConfig
from pagemill.core.layers import CacheConfig
from pagemill.core.request import Request, SamplingParams, StopParams
from pagemill.core.types import RequestId, SequenceId
from pagemill.engine.loop import EngineLoop, Inbox
from pagemill.kernels.codec import FORMATS
from pagemill.kernels.device import CpuKernels, Kernels
from pagemill.kernels.kv_storage import KVStorage
from pagemill.models.config import ModelConfig
from pagemill.models.decoder import Decoder, TokenBatch
from pagemill.models.loader import Model
from pagemill.models.placement import weights_on
from pagemill.runtime.cost import CostModel
from pagemill.runtime.model_runner import ModelRunner
from pagemill.sched.scheduler import Scheduler
from pagemill.sched.values import SchedulerConfig

BLOCK_SIZE = EngineConfig(model="any").block_size


class _Recorder(Decoder):
    """Keeps the hidden states of every step."""

    hidden: list[torch.Tensor]

    def forward(self, batch: TokenBatch, storage: KVStorage) -> torch.Tensor:
        out = super().forward(batch, storage)
        self.hidden.append(out.clone())
        return out


@dataclass(frozen=True, slots=True)
class PagedRun:
    """``token_ids``: prompt and output. ``logits`` [len - 1, V]: row i judges token i + 1.

    ``num_steps`` is how many steps the run took.
    """

    token_ids: list[int]
    logits: torch.Tensor
    num_steps: int


def run_paged(
    model: Model,
    prompt: Sequence[int],
    num_output_tokens: int,
    *,
    chunk_tokens: int,
    kv_format: str = "fp32",
    kernels: Kernels | None = None,
) -> PagedRun:
    """Greedy output of one prompt, cut into chunks of ``chunk_tokens``; no token ends it."""
    kernels = kernels or CpuKernels()
    num_tokens = len(prompt) + num_output_tokens
    has_tails = FORMATS[kv_format].codes_whole_groups
    cache_config = _cache_config(model.config, num_tokens, chunk_tokens, int(has_tails))
    config = model.config
    storage = kernels.make_storage(
        cache_config,
        kv_format,
        config.num_kv_heads,
        config.head_dim,
        num_tails=cache_config.num_tails,
    )
    decoder = _Recorder(config, weights_on(model.weights, kernels.device), num_tokens, kernels)
    decoder.hidden = []
    weights = model.weights
    cost = CostModel(
        config, weights.num_bytes(), weights.num_matrix_parameters(), (1.0,) * config.num_layers
    )
    runner = ModelRunner(decoder, storage, cost)
    try:
        token_ids = _drive(runner, cache_config, prompt, num_output_tokens, chunk_tokens)
    finally:
        runner.close()
    with torch.inference_mode():
        logits = decoder.logits(torch.cat(decoder.hidden))
    return PagedRun(token_ids, logits, len(decoder.hidden))


def _cache_config(
    config: ModelConfig, num_tokens: int, chunk_tokens: int, num_tails: int
) -> CacheConfig:
    """Just enough blocks: a window group that kept what left its window would run dry."""
    most = -(-num_tokens // BLOCK_SIZE) + 2
    blocks = [
        most if g.window is None else min(most, (g.window + chunk_tokens) // BLOCK_SIZE + 4)
        for g in config.layer_groups
    ]
    return CacheConfig(config.layer_groups, tuple(blocks), BLOCK_SIZE, num_tails=num_tails)


def _drive(
    runner: ModelRunner,
    cache_config: CacheConfig,
    prompt: Sequence[int],
    num_output_tokens: int,
    chunk_tokens: int,
) -> list[int]:
    cache = CacheManager(cache_config, server_key=bytes(32), fingerprint=b"tested")
    limit = len(prompt) + num_output_tokens
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=chunk_tokens, max_num_seqs=1, max_queue=4, max_model_len=limit
        ),
        cache,
    )
    ended: list[object] = []
    inbox = Inbox(4)
    loop = EngineLoop(scheduler, runner, SystemClock(), inbox, lambda *why: ended.append(why))
    request = Request(
        request_id=RequestId("tested"),
        sequence_id=SequenceId(1),
        token_ids=array("I", prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0),
        stop=StopParams(max_tokens=num_output_tokens),
        namespace=cache.namespace(tenant="", salt=""),
        arrival_ns=0,
    )
    inbox.add(request, 0)
    while loop.step() is not None:
        pass
    assert not ended and len(request.token_ids) == limit, f"the run broke off: {ended}"
    scheduler.check_integrity()
    return list(request.token_ids)


def assert_same_as(reference: torch.Tensor, run: PagedRun, num_prompt_tokens: int) -> float:
    """The run against ``reference`` logits [len - 1, V] for the run's own tokens.

    Every logit agrees to 1e-3, and every output token is the reference's best; a first difference
    is accepted only where its two best logits are at most 1e-4 apart. Returns the largest
    difference of a logit.
    """
    assert reference.shape == run.logits.shape
    difference = (reference - run.logits).abs()
    worst = float(difference.max())
    row = int(difference.amax(dim=1).argmax())
    assert worst < 1e-3, f"logits differ by {worst:.3g}, first worst at position {row}"
    for position in range(num_prompt_tokens, len(run.token_ids)):
        best = reference[position - 1].topk(2)
        if int(best.indices[0]) != run.token_ids[position]:
            gap = float(best.values[0] - best.values[1])
            assert gap <= 1e-4, f"token {position} differs where the best is {gap:.3g} ahead"
            break
    return worst
