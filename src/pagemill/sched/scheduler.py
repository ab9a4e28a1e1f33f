"""Who computes what next. One idea: computed tokens catch up with known tokens.

There is no prefill phase and no decode phase. A step has a token budget; running sequences get
theirs first, then waiting ones in order. Chunked prefill, prefix hits and preempted requests that
come back are all the same case: num_computed_tokens is behind num_tokens.
"""

from dataclasses import dataclass, field

from pagemill.cache.manager import CacheManager
from pagemill.cache.prefix_index import PrefixMatch
from pagemill.core.errors import IntegrityError, QueueFullError, TooLongError
from pagemill.core.request import FinishReason, Request, RequestStatus
from pagemill.core.step import (
    BlockCopy,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
)
from pagemill.core.types import SequenceId, StepId
from pagemill.sched.admission import Admission
from pagemill.sched.budget import TokenBudget
from pagemill.sched.parts import fresh_scores, num_kept_tokens, sequence_plan, shared_runs
from pagemill.sched.preemption import choose_victim
from pagemill.sched.queue import WaitingQueue, order_named
from pagemill.sched.values import SchedulerConfig, SchedulerStats, SequenceOutput

MAX_LOOK_AHEAD = 64
"""Waiting requests that are looked at for the fast lane in one step."""


@dataclass(slots=True)
class _Planned:
    request: Request
    count: int
    copies: tuple[BlockCopy, ...] = field(default=())


class Scheduler:
    """Decides steps over one CacheManager.

        add -> WAITING -> RUNNING -> FINISHED          abort: from any state, all blocks come back
                  ^          |
                  +- PREEMPTED (blocks released, tokens kept)

    1. A running request has an open table; a waiting, preempted or finished one has none.
    2. At most max_num_seqs requests run, at most max_queue wait.
    3. A plan never computes more tokens than the budget; every decode that fits is in it.
    4. The first request in order is never preempted.
    5. Between plan and apply nothing else may be called but plan's own apply.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._order = order_named(config.policy)
        self._has_window = any(group.window for group in cache.config.groups)
        self._waiting = WaitingQueue(self._order)
        self._running: list[Request] = []
        self._by_id: dict[SequenceId, Request] = {}
        self._next_step = 0
        self._in_flight: StepPlan | None = None

    # ------------------------------------------------------------ requests in and out

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises TooLongError if such a request can never run, however long it waits."""
        total = num_prompt_tokens + max_tokens
        if total > self.config.max_model_len:
            raise TooLongError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens are more than"
                f" the context of {self.config.max_model_len} tokens: shorten the prompt or lower"
                " max_tokens"
            )
        capacity = self.max_sequence_tokens()
        if total > capacity:
            raise TooLongError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens can never fit"
                f" the block pool of {capacity} tokens: shorten the prompt, lower max_tokens, or"
                " start the server with more --kv-memory"
            )

    def max_sequence_tokens(self) -> int:
        """The longest sequence that the empty pool holds."""
        return self.cache.max_tokens(chunk_tokens=self.config.max_num_batched_tokens)

    def add(self, request: Request) -> None:
        """Take a request in. Raises TooLongError or QueueFullError; then nothing has changed."""
        self.check_fits(request.num_prompt_tokens, request.stop.max_tokens)
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFullError(f"{len(self._waiting)} requests wait already: try again later")
        assert request.sequence_id not in self._by_id, "a sequence id is used once"
        assert request.num_tokens > 0, "an empty prompt has nothing to compute"
        self._by_id[request.sequence_id] = request
        self._waiting.push(request)

    def abort(self, sequence_id: SequenceId) -> Request | None:
        """End a request in any state; its blocks are back on return. None if it is not there."""
        assert self._in_flight is None, "abort is called between steps"
        request = self._by_id.get(sequence_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._finish(request, FinishReason.ABORT)
        self.stats.num_aborted += 1
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.table_id is not None:
            self._let_go(
                request,
                is_sound=reason is not FinishReason.ERROR,
                is_finished=reason is not FinishReason.ABORT,
            )
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._by_id[request.sequence_id]

    def _let_go(self, request: Request, *, is_sound: bool, is_finished: bool) -> None:
        """Release the blocks. ``is_sound``: all computed tokens have their KV in them, so that the
        last ones can be found again too."""
        table = request.table_id
        assert table is not None
        if is_sound:
            self.cache.commit(table, request.token_ids, num_kept_tokens(request, self.cache))
        self.cache.release(table, is_finished=is_finished, has_tool_calls=request.has_tools)
        request.table_id = None

    # ------------------------------------------------------------ plan

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None where nothing can be computed."""
        assert self._in_flight is None, "the last step has not been applied"
        self.cache.advance(now_ns)
        budget = TokenBudget(main=self.config.max_num_batched_tokens)
        planned: dict[SequenceId, _Planned] = {}
        num_preemptions = self.stats.num_preemptions
        self._running.sort(key=self._order)
        self._plan_decodes(planned, budget)
        budget.split(keep_fast_lane=self._has_two_prompts())
        self._plan_running_prompts(planned, budget)
        if self.stats.num_preemptions == num_preemptions:
            self._admit(planned, budget, now_ns)
        self._use_rest(planned, budget)
        if not planned:
            assert not self._running, "running requests must make progress"
            return None
        return self._emit(list(planned.values()))

    def _has_two_prompts(self) -> bool:
        prompts = sum(request.num_missing_tokens > 1 for request in self._running)
        return prompts + len(self._waiting) > 1

    def _plan_decodes(self, planned: dict[SequenceId, _Planned], budget: TokenBudget) -> None:
        for request in list(self._running):
            if request.num_missing_tokens == 1 and request.status is RequestStatus.RUNNING:
                self._plan_one(request, 1, planned, budget)

    def _plan_running_prompts(
        self, planned: dict[SequenceId, _Planned], budget: TokenBudget
    ) -> None:
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING or request.sequence_id in planned:
                continue
            fast = self._is_short(request.num_missing_tokens)
            lane = budget.left if fast else budget.main
            count = min(request.num_missing_tokens, lane)
            if count > 0:
                self._plan_one(request, count, planned, budget, from_fast=fast)

    def _is_short(self, num_missing_tokens: int) -> bool:
        return num_missing_tokens <= self.config.max_num_batched_tokens

    def _plan_one(
        self,
        request: Request,
        count: int,
        planned: dict[SequenceId, _Planned],
        budget: TokenBudget,
        *,
        from_fast: bool = False,
    ) -> bool:
        """Give a running request ``count`` tokens, preempting behind it as needed."""
        assert request.table_id is not None
        while True:
            copies = self.cache.extend(request.table_id, request.num_computed_tokens + count)
            if copies is not None:
                break
            victim = choose_victim(self._running, request, self._order)
            if victim is None:
                if self._running == [request]:
                    raise AssertionError("a request alone must fit: check_fits is wrong")
                self._preempt(request, planned, budget)
                return False
            self._preempt(victim, planned, budget)
        budget.take(count, from_fast=from_fast)
        planned[request.sequence_id] = _Planned(request, count, copies)
        return True

    def _preempt(
        self, victim: Request, planned: dict[SequenceId, _Planned], budget: TokenBudget
    ) -> None:
        """Release the victim's blocks; it waits at its old place and computes them again."""
        dropped = planned.pop(victim.sequence_id, None)
        if dropped is not None:
            budget.give_back(dropped.count)
            self.cache.release_copies(dropped.copies)
        copied = dropped is not None and bool(dropped.copies)  # a target that nobody has filled
        self._let_go(victim, is_sound=not copied, is_finished=False)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.num_recomputed_tokens += victim.num_computed_tokens
        self.stats.num_recomputed_tokens += victim.num_computed_tokens
        victim.num_computed_tokens = 0
        self.stats.num_preemptions += 1
        self._running.remove(victim)
        self._waiting.push(victim)

    def _use_rest(self, planned: dict[SequenceId, _Planned], budget: TokenBudget) -> None:
        """What the fast lane did not use goes to the prompts in the main lane."""
        for item in list(planned.values()):
            request = item.request
            more = min(request.num_missing_tokens - item.count, budget.left)
            if more <= 0 or request.table_id is None:
                continue
            target = request.num_computed_tokens + item.count + more
            copies = self.cache.extend(request.table_id, target)
            if copies is None:
                return
            budget.take(more)
            item.count += more
            item.copies += copies

    # ------------------------------------------------------------ admission

    def _admit(self, planned: dict[SequenceId, _Planned], budget: TokenBudget, now_ns: int) -> None:
        admission = Admission(
            self.cache, self._running, chunk_tokens=self.config.max_num_batched_tokens
        )
        for request in list(self._waiting)[:MAX_LOOK_AHEAD]:
            if len(self._running) >= self.config.max_num_seqs or budget.left == 0:
                return
            fast = self._is_short(request.num_missing_tokens)
            lane = budget.left if fast else budget.main
            if lane == 0:
                continue  # a long prompt waits for the main lane; short ones may pass it
            match = admission.match(request)
            if match is None:
                return  # too few blocks: nobody overtakes, so that the head cannot starve
            self._start(request, match, now_ns)
            count = min(request.num_missing_tokens, lane)
            if not self._plan_one(request, count, planned, budget, from_fast=fast):
                return
            admission.started(request)

    def _start(self, request: Request, match: PrefixMatch, now_ns: int) -> None:
        request.table_id = self.cache.open(
            match,
            request.namespace,
            is_resumed=request.num_preemptions > 0,
            tenant=request.tenant_id,
        )
        if not request.retention.is_default:
            self.cache.retain(request.table_id, request.retention, request.tenant_id)
        self._count_hits(request, match.num_tokens)
        request.num_computed_tokens = match.num_tokens
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = now_ns
        self._waiting.remove(request)
        self._running.append(request)

    def _count_hits(self, request: Request, num_hit_tokens: int) -> None:
        """A first admission counts hits; a return only lessens what must be computed again."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hit_tokens
            self.stats.num_prompt_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += num_hit_tokens
            return
        kept = min(num_hit_tokens, request.num_recomputed_tokens)
        request.num_recomputed_tokens -= kept
        self.stats.num_recomputed_tokens -= kept
        self.stats.num_found_later_tokens += num_hit_tokens - kept

    # ------------------------------------------------------------ emit and apply

    def _emit(self, planned: list[_Planned]) -> StepPlan:
        tables = [item.request.table_id for item in planned if item.request.table_id is not None]
        sequences = tuple(sequence_plan(item.request, item.count) for item in planned)
        plan = StepPlan(
            step_id=StepId(self._next_step),
            sequences=sequences,
            tables=self.cache.block_tables(tables),
            copies=tuple(copy for item in planned for copy in item.copies),
            tail_slots=self.cache.tail_slots(tables),
            shared=shared_runs(sequences, self.cache),
        )
        self._next_step += 1
        self.stats.num_steps += 1
        self._in_flight = plan
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[SequenceOutput]:
        """Take in what a step gave: append tokens, publish full blocks, finish, release."""
        assert self._in_flight is plan, "a plan is applied once, and in order"
        assert result.step_id == plan.step_id, "the result belongs to another step"
        self._in_flight = None
        self.cache.release_copies(plan.copies)
        return [
            self._apply_one(part, outcome, now_ns)
            for part, outcome in zip(plan.sequences, result.sequences, strict=True)
        ]

    def fail(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        """The step did not run: its requests end with an error, nothing of it is published."""
        assert self._in_flight is plan, "a plan is failed once"
        self._in_flight = None
        self.cache.release_copies(plan.copies)
        words = f"the step failed: {type(error).__name__}: {error}"
        outcomes = [SequenceResult(part.sequence_id, None, error=words) for part in plan.sequences]
        return [self._apply_one(p, o, 0) for p, o in zip(plan.sequences, outcomes, strict=True)]

    def _apply_one(
        self, part: SequencePlan, outcome: SequenceResult, now_ns: int
    ) -> SequenceOutput:
        request = self._by_id[part.sequence_id]
        assert request.table_id is not None
        request.num_computed_tokens += part.count
        if outcome.error is None:
            self._commit(request, part)
        if outcome.token_id is not None:
            request.token_ids.append(outcome.token_id)
            self.stats.num_output_tokens += 1
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
        reason = FinishReason.ERROR if outcome.error else self._why_finished(request, outcome)
        if reason is not None:
            self._running.remove(request)
            self._finish(request, reason)
            self.stats.num_finished += 1
        return SequenceOutput(
            request,
            outcome.token_id,
            outcome.logprobs,
            fresh_scores(request, part, outcome.prompt_logprobs),
            reason,
            outcome.error,
        )

    def _commit(self, request: Request, part: SequencePlan) -> None:
        """Publish when a block filled up; a decode inside a block has nothing to say, except that
        a window moved on: then a block may have left it."""
        assert request.table_id is not None
        block_size = self.cache.config.block_size
        is_full = part.start // block_size != request.num_computed_tokens // block_size
        if is_full or self._has_window:
            kept = num_kept_tokens(request, self.cache)
            self.cache.commit(request.table_id, request.token_ids, kept)

    def _why_finished(self, request: Request, outcome: SequenceResult) -> FinishReason | None:
        if outcome.token_id is None:
            if request.num_missing_tokens == 0:  # a prompt scored, nothing to generate
                return FinishReason.LENGTH
            return None
        if outcome.token_id in request.stop.stop_token_ids:
            request.stop_token_id = outcome.token_id
            return FinishReason.STOP
        if request.num_output_tokens >= request.stop.max_tokens:
            return FinishReason.LENGTH
        return None

    def check_integrity(self) -> None:
        """Between steps running requests alone hold blocks. Raises IntegrityError."""
        self.cache.check_integrity()
        stats, count = self.cache.stats(), len(self._running)
        if stats.num_open_tables != count or stats.num_pending_copies:
            pending = f"{stats.num_open_tables} tables and {stats.num_pending_copies} copies"
            raise IntegrityError(2, f"{pending} are open, and {count} requests run")
        for request in self._running:
            assert request.table_id is not None, f"{request.request_id} runs without a table"
        for request in self._waiting:
            assert request.table_id is None, f"{request.request_id} waits with a table"
