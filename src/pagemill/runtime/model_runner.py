"""The real executor: runs step plans on a model over paged KV, in a thread of its own."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from pagemill.core.step import (
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from pagemill.core.types import StepId
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.sampling import Sampler, SampleRow, token_logprobs
from pagemill.models.decoder import Decoder
from pagemill.runtime.batch import last_rows, make_batch
from pagemill.runtime.cost import CostModel


class ModelRunner:
    """Executor over a Decoder and a KVStorage.

    1. Steps run one after another, in the order of submission, in one thread: ``thread``, which is
       given where the model was loaded in it already, and is shut down with the runner.
    2. ``submit`` returns at once; every step is collected once, in order.
    3. Copies of blocks happen before anything of the step is written or read.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVStorage,
        cost_model: CostModel,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self._decoder = decoder
        self._storage = storage
        self._cost_model = cost_model
        self._sampler = Sampler(decoder.config.vocab_size)
        self._thread = thread or ThreadPoolExecutor(max_workers=1)
        self._submitted: deque[tuple[StepId, Future[StepResult]]] = deque()

    def submit(self, plan: StepPlan) -> StepId:
        """Start a step and return at once."""
        self._submitted.append((plan.step_id, self._thread.submit(self._run, plan)))
        return plan.step_id

    def collect(self, step_id: StepId) -> StepResult:
        """Wait for the oldest submitted step, which must be ``step_id``."""
        assert self._submitted and self._submitted[0][0] == step_id, "steps are collected in order"
        return self._submitted.popleft()[1].result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        started_ns = time.perf_counter_ns()
        for copy in plan.copies:
            self._storage.copy_blocks(copy.group, [(copy.source, copy.target)])
        batch = make_batch(plan, self._storage.block_size)
        hidden = self._decoder.forward(batch, self._storage)
        sampled = self._sample(plan, hidden)
        results = tuple(
            self._result(plan, i, part, hidden, sampled) for i, part in enumerate(plan.sequences)
        )
        cost = self._cost_model.of(plan)
        self._decoder.kernels.wait()
        return StepResult(
            step_id=plan.step_id,
            sequences=results,
            weight_bytes=cost.weight_bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
            time_ns=time.perf_counter_ns() - started_ns,
        )

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, SequenceResult]:
        """Results of the sequences that reach their last known token, by index in the plan."""
        rows = last_rows([part.count for part in plan.sequences])
        chosen = [i for i, part in enumerate(plan.sequences) if part.sampling is not None]
        if not chosen:
            return {}
        logits = self._decoder.logits(hidden[[rows[i] for i in chosen]])
        asked = [_sample_row(plan.sequences[i]) for i in chosen]
        samples = self._sampler.sample(logits, asked)
        return {
            i: SequenceResult(
                sequence_id=plan.sequences[i].sequence_id,
                token_id=sample.token_id,
                logprobs=sample.logprobs,
                error=sample.error,
            )
            for i, sample in zip(chosen, samples, strict=True)
        }

    def _result(
        self,
        plan: StepPlan,
        index: int,
        part: SequencePlan,
        hidden: torch.Tensor,
        sampled: dict[int, SequenceResult],
    ) -> SequenceResult:
        outcome = sampled.get(index) or SequenceResult(part.sequence_id, None)
        if part.prompt_logprobs is None:
            return outcome
        first = sum(earlier.count for earlier in plan.sequences[:index])
        scored = self._score_prompt(part, hidden[first : first + part.count])
        return SequenceResult(
            outcome.sequence_id, outcome.token_id, outcome.logprobs, scored, outcome.error
        )

    def _score_prompt(self, part: SequencePlan, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens that follow the rows of this part."""
        targets = list(part.token_ids[1:])
        if part.next_prompt_token_id is not None:
            targets.append(part.next_prompt_token_id)
        if not targets:
            return ()
        assert part.prompt_logprobs is not None
        logits = self._decoder.logits(hidden[: len(targets)])
        return tuple(token_logprobs(logits, targets, part.prompt_logprobs))


def _sample_row(part: SequencePlan) -> SampleRow:
    assert part.sampling is not None
    return SampleRow(
        sequence_id=part.sequence_id,
        params=part.sampling,
        position=part.start + part.count,
        num_prompt_tokens=part.num_prompt_tokens,
        history=part.history,
    )
