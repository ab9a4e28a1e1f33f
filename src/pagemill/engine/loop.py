"""The step, in three calls: plan, run, apply. Torch-free: the engine and the simulator share it."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from pagemill.core.clock import Clock
from pagemill.core.errors import QueueFullError
from pagemill.core.executor import Executor
from pagemill.core.request import Request
from pagemill.core.step import StepPlan, StepResult
from pagemill.core.types import SequenceId
from pagemill.sched.scheduler import Scheduler
from pagemill.sched.values import SequenceOutput

LOG = logging.getLogger("pagemill.engine")
MAX_CALLS = 64


class Inbox:
    """What other threads ask of the loop, until the top of a step. Bounded by ``max_queue``."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._lock = Lock()
        self._new: deque[Request] = deque()
        self._cancelled: deque[SequenceId] = deque()
        self._calls: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._new) + len(self._cancelled) + len(self._calls)

    def add(self, request: Request, num_waiting: int) -> None:
        """Raises QueueFullError when as many wait as may."""
        with self._lock:
            waiting = len(self._new) + num_waiting
            if waiting >= self._max_queue:
                raise QueueFullError(
                    f"{waiting} requests wait and the queue holds {self._max_queue}:"
                    " try again in a moment"
                )
            self._new.append(request)

    def cancel(self, sequence_id: SequenceId) -> None:
        with self._lock:
            self._cancelled.append(sequence_id)

    def call(self, run: Callable[[], None]) -> None:
        """``run`` in the engine's thread, between two steps. Raises QueueFullError."""
        with self._lock:
            if len(self._calls) >= MAX_CALLS:
                raise QueueFullError(f"{MAX_CALLS} calls wait already: try again in a moment")
            self._calls.append(run)

    def drop_call(self, run: Callable[[], None]) -> bool:
        """Take a call back: nobody runs it once the engine's thread has ended. False when that
        thread took it before: then it is done, or will be."""
        with self._lock:
            if run not in self._calls:
                return False
            self._calls.remove(run)
            return True

    def take_calls(self) -> list[Callable[[], None]]:
        with self._lock:
            taken = list(self._calls)
            self._calls.clear()
            return taken

    def take(self) -> tuple[list[Request], list[SequenceId]]:
        """Everything new, in order. Requests come first, so that none is cancelled unseen."""
        with self._lock:
            taken = list(self._new), list(self._cancelled)
            self._new.clear()
            self._cancelled.clear()
            return taken


@dataclass(frozen=True, slots=True)
class Step:
    """One step that ran, and what it gave."""

    plan: StepPlan
    result: StepResult
    outputs: tuple[SequenceOutput, ...]
    ended_ns: int


class EngineLoop:
    """poll, plan, run, apply. One thread calls ``step``; any thread may fill the inbox."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        inbox: Inbox,
        on_ended: Callable[[Request, Exception | None], None],
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._inbox = inbox
        self._on_ended = on_ended

    def step(self) -> Step | None:
        """Run one step. None where there was nothing to compute."""
        self._poll()
        plan = self.scheduler.plan(self._clock.now_ns())
        if plan is None:
            return None
        result, outputs = self._run(plan)
        return Step(plan, result, tuple(outputs), self._clock.now_ns())

    def _run(self, plan: StepPlan) -> tuple[StepResult, list[SequenceOutput]]:
        """A step that fails ends the requests in it with an error; all others go on."""
        try:
            result = self.executor.collect(self.executor.submit(plan))
        except Exception as error:
            LOG.exception("step %d failed", plan.step_id)
            return StepResult(plan.step_id, ()), self.scheduler.fail(plan, error)
        return result, self.scheduler.apply(plan, result, self._clock.now_ns())

    def _poll(self) -> None:
        """Take in cancelled and new requests. Nothing else reaches the scheduler from outside."""
        for call in self._inbox.take_calls():
            call()
        new, cancelled = self._inbox.take()
        for request in new:
            try:
                self.scheduler.add(request)
            except Exception as error:  # told to the caller; the loop goes on for the others
                self._on_ended(request, error)
        for sequence_id in cancelled:
            request_or_none = self.abort(sequence_id)
            if request_or_none is not None:
                self._on_ended(request_or_none, None)

    def abort(self, sequence_id: SequenceId) -> Request | None:
        """End a request between steps; its blocks are back at once. None if it has ended."""
        return self.scheduler.abort(sequence_id)
