"""The engine facade: requests in, pieces of text out. Runs the loop in a thread of its own.

Knows tokens and text; knows no HTTP. Pieces are handed to a callback in the engine's thread, so the
callback must be quick and must not call the engine.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from threading import Event, Lock, Thread
from typing import TypeVar

from pagemill.cache.manager import CacheManager
from pagemill.core.clock import Clock
from pagemill.core.errors import EngineStoppedError, RequestError
from pagemill.core.executor import Executor
from pagemill.core.request import FinishReason, Request, SamplingParams, StopParams
from pagemill.core.retention import KEEP_AS_USUAL, Retention
from pagemill.core.step import TokenLogprobs
from pagemill.core.types import RequestId, SequenceId
from pagemill.engine.loop import EngineLoop, Inbox, Step
from pagemill.engine.text import StopStrings, check_stop_strings
from pagemill.models.tokenizer import IncrementalDetokenizer, Tokenizer
from pagemill.sched.scheduler import Scheduler
from pagemill.sched.values import SequenceOutput

LOG = logging.getLogger("pagemill.engine")
IDLE_WAIT_S = 0.5
MAX_NAMESPACES = 4096
STOPPED = "the server is shutting down: send the request elsewhere"
CUT_OFF = "the server shut down before this answer was complete: send the request again"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request so far."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to a request. The last piece has a ``finish_reason``.

    ``text`` may be empty while a character or a stop string is incomplete; it never holds a broken
    character or a part of a stop string. ``stop_reason`` is the stop string or token id that was
    met.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None


OnPiece = Callable[[Piece], None]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Generate:
    """One prompt and how to go on. ``max_tokens`` None: as far as context and pool allow."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    retention: Retention = KEEP_AS_USUAL
    has_tools: bool = False
    skip_special_tokens: bool = True
    request_id: str | None = None


class _Stream:
    """The text side of one running request."""

    def __init__(
        self, request: Request, ask: Generate, tokenizer: Tokenizer | None, on_piece: OnPiece
    ) -> None:
        self.request = request
        self.on_piece = on_piece
        self._stops = StopStrings(ask.stop)
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=ask.skip_special_tokens)
            if tokenizer
            else None
        )

    def push(self, output: SequenceOutput) -> tuple[str, str | None]:
        """(new text to show, the stop string met or None)."""
        text, met = "", None
        is_stop_token = output.request.stop_token_id is not None
        if output.token_id is not None and self._detokenizer and not is_stop_token:
            text, met = self._stops.push(self._detokenizer.push(output.token_id))
        if output.finish_reason is not None and met is None:
            text += self._stops.flush()
        return text, met


class Engine:
    """One model behind one scheduler and one cache.

        new -> running -> draining -> stopped      (a failed step ends its requests, not the engine)

    1. Only the engine's thread touches the scheduler, the cache and the executor.
    2. Every request that ``generate`` accepted gets exactly one piece with a finish reason.
    3. At idle the cache is checked; a broken invariant is logged and counted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        executor: Executor,
        clock: Clock,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int] = (),
        on_step: Callable[[Step], None] | None = None,
        on_finish: Callable[[Request], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.cache = cache
        self.num_integrity_failures = 0
        self.num_integrity_checks = 0
        self._clock = clock
        self._executor = executor
        self._eos = frozenset(eos_token_ids)
        self._inbox = Inbox(scheduler.config.max_queue)
        self.loop = EngineLoop(scheduler, executor, clock, self._inbox, self._ended)
        self._on_step = on_step
        self._on_finish = on_finish
        self._streams: dict[SequenceId, _Stream] = {}
        self._lock = Lock()
        self._tenant_ids: dict[str, int] = {}
        self._namespaces: dict[str, dict[bytes, None]] = {}
        self._ids = count(1)
        self._wake = Event()
        self._idle = Event()
        self._stopping = False
        self._has_ended = False
        self._draining = False
        self._thread = Thread(target=self._run, name="pagemill-engine", daemon=True)

    # ------------------------------------------------------------ called from any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def has_requests(self) -> bool:
        """True while some accepted request has not got its last piece."""
        return bool(self._streams)

    def generate(self, ask: Generate, on_piece: OnPiece) -> SequenceId:
        """Take a request. Raises RequestError, QueueFullError or EngineStoppedError at once."""
        if self._draining or not self._thread.is_alive():
            raise EngineStoppedError(STOPPED)
        sequence_id = self.generate_later(ask, on_piece)
        # the thread may have ended since; then nobody takes the request, unless its end was told
        if self._has_ended and self._streams.pop(sequence_id, None) is not None:
            raise EngineStoppedError(STOPPED)
        return sequence_id

    def generate_later(self, ask: Generate, on_piece: OnPiece) -> SequenceId:
        """As ``generate``, for a caller that steps the engine itself instead of starting it."""
        request = self._request(ask)
        sequence_id = request.sequence_id
        with self._lock:
            # first the receiver: the engine's thread may end the request before ``add`` returns
            self._streams[sequence_id] = _Stream(request, ask, self.tokenizer, on_piece)
            try:
                self._inbox.add(request, self.scheduler.num_waiting)
            except BaseException:
                self._streams.pop(sequence_id, None)
                raise
            self._idle.clear()
        self._wake.set()
        return sequence_id

    def cancel(self, sequence_id: SequenceId) -> None:
        """Its blocks are back at the top of the next step; it gets a last piece with ABORT."""
        self._inbox.cancel(sequence_id)
        self._wake.set()

    def call(self, run: Callable[[CacheManager], Made]) -> Future[Made]:
        """``run`` on the cache between two steps. Raises QueueFullError or EngineStoppedError."""
        if not self._thread.is_alive():
            raise EngineStoppedError(STOPPED)
        done: Future[Made] = Future()

        def run_it() -> None:
            try:
                done.set_result(run(self.cache))
            except Exception as error:  # told to the caller; the engine goes on
                done.set_exception(error)

        self._inbox.call(run_it)
        self._wake.set()
        if self._has_ended and self._inbox.drop_call(run_it):
            raise EngineStoppedError(STOPPED)
        return done

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones. False when time ran out."""
        self._draining = True
        self._wake.set()
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Stop at the next step; whoever still waits gets a last piece with ABORT and an error."""
        self._draining = self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._executor.close()

    def _request(self, ask: Generate) -> Request:
        check_stop_strings(ask.stop)
        num_prompt_tokens = len(ask.token_ids)
        if num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        max_tokens = self._max_tokens(num_prompt_tokens, ask.max_tokens)
        self.scheduler.check_fits(num_prompt_tokens, max_tokens)
        sequence_id = SequenceId(next(self._ids))
        stop_ids = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else self._eos)
        return Request(
            request_id=RequestId(ask.request_id or f"request-{sequence_id}"),
            sequence_id=sequence_id,
            token_ids=array("I", ask.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=ask.sampling,
            stop=StopParams(max_tokens=max_tokens, stop_token_ids=stop_ids),
            namespace=self._namespace(ask),
            tenant_id=self._tenant_id(ask.tenant),
            retention=ask.retention,
            has_tools=ask.has_tools,
            arrival_ns=self._clock.now_ns(),
            priority=ask.priority,
            skip_cache_read=ask.sampling.prompt_logprobs is not None,
        )

    def _namespace(self, ask: Generate) -> bytes:
        """The root of its chains; remembered as one of the tenant's, up to MAX_NAMESPACES."""
        found = self.cache.namespace(tenant=ask.tenant, salt=ask.salt)
        with self._lock:
            known = self._namespaces.setdefault(ask.tenant, {})
            known.pop(found, None)
            known[found] = None
            if len(known) > MAX_NAMESPACES:
                del known[next(iter(known))]
        return found

    def namespaces(self, tenant: str) -> list[bytes]:
        """Roots under which the tenant has asked, the last MAX_NAMESPACES of them."""
        with self._lock:
            return list(self._namespaces.get(tenant, ()))

    def _tenant_id(self, tenant: str) -> int:
        """From 1, in the order in which tenants come."""
        with self._lock:
            return self._tenant_ids.setdefault(tenant, len(self._tenant_ids) + 1)

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        if asked is not None:
            return asked
        room = min(self.scheduler.config.max_model_len, self.scheduler.max_sequence_tokens())
        return max(1, room - num_prompt_tokens)

    # ------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step() and not self._inbox and not self.scheduler.has_work:
                    self._rest()
        except Exception as error:  # a bug: nobody may wait for ever, and /health must say so
            LOG.exception("the engine has failed and stops")
            self._draining = True
            self._end_all(FinishReason.ERROR, error)
            return
        for sequence_id in list(self._streams):
            self.scheduler.abort(sequence_id)
        self._end_all(FinishReason.ABORT, EngineStoppedError(CUT_OFF))

    def step(self) -> bool:
        """Run one step and hand out its pieces. False where there was nothing to compute."""
        step = self.loop.step()
        if step is None:
            return False
        if self._on_step is not None:  # first: a last piece makes ``on_finish`` forget its request
            self._on_step(step)
        for output in step.outputs:
            self._deliver_one(output)
        return True

    def _rest(self) -> None:
        """Idle: check the cache once, then sleep until something arrives."""
        self.num_integrity_checks += 1
        try:
            self.scheduler.check_integrity()
        except Exception:
            self.num_integrity_failures += 1
            LOG.exception("the idle integrity check failed")
        with self._lock:  # a request that is being taken in is seen, or clears this afterwards
            if not self._inbox:
                self._idle.set()
        self._wake.clear()
        while not self._inbox and not self._stopping:
            self._wake.wait(IDLE_WAIT_S)
            self._wake.clear()
        if self._inbox:
            self._idle.clear()

    def _deliver_one(self, output: SequenceOutput) -> None:
        request = output.request
        stream = self._streams.get(request.sequence_id)
        if stream is None:
            return
        text, met = stream.push(output)
        reason, stop_reason = output.finish_reason, request.stop_token_id
        if met is not None and reason is not FinishReason.ERROR:
            if reason is None:
                self.loop.abort(request.sequence_id)
            reason = FinishReason.STOP
        piece = Piece(
            text=text,
            token_ids=() if output.token_id is None else (output.token_id,),
            usage=_usage(request),
            logprobs=() if output.logprobs is None else (output.logprobs,),
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=reason,
            stop_reason=met if met is not None else stop_reason,
            error=RuntimeError(output.error) if output.error else None,
        )
        self._hand_out(request, stream, piece)

    def _hand_out(self, request: Request, stream: _Stream, piece: Piece) -> None:
        if piece.finish_reason is not None:
            request.finish_reason = piece.finish_reason
            self._streams.pop(request.sequence_id, None)
            if self._on_finish is not None:
                self._on_finish(request)
        try:
            stream.on_piece(piece)
        except Exception:
            LOG.exception("the receiver of %s failed", request.request_id)

    def _ended(self, request: Request, error: Exception | None) -> None:
        """A request was refused late (with an error) or cancelled (without)."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        stream = self._streams.get(request.sequence_id)
        if stream is not None:
            piece = Piece("", (), _usage(request), finish_reason=reason, error=error)
            self._hand_out(request, stream, piece)

    def _end_all(self, reason: FinishReason, error: Exception) -> None:
        """A last piece for everybody; one receiver that fails does not stop the others."""
        self._has_ended = True
        for call in self._inbox.take_calls():  # somebody waits for each
            call()
        for sequence_id in list(self._streams):
            stream = self._streams.pop(sequence_id, None)
            if stream is None:
                continue
            request = stream.request
            piece = Piece("", (), _usage(request), finish_reason=reason, error=error)
            try:
                self._hand_out(request, stream, piece)
            except Exception:
                LOG.exception("the end of %s could not be told", request.request_id)
        self._idle.set()


def _usage(request: Request) -> Usage:
    return Usage(
        request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens or 0
    )
