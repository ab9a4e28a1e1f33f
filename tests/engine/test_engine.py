"""The engine's own promises: one last piece for everybody, whatever happens."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoints import random_prompt
from model.tiny_engine import TinyEngine, tiny_checkpoint
from pagemill.core.errors import EngineStoppedError, QueueFullError, RequestError, TooLongError
from pagemill.core.request import FinishReason, Request, SamplingParams
from pagemill.core.step import StepPlan
from pagemill.core.types import SequenceId, StepId
from pagemill.engine.engine import Generate, Piece

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture
def tiny(checkpoint: Path, key_file: Path) -> Iterator[TinyEngine]:
    engine = TinyEngine(checkpoint, key_file, num_blocks=60, max_queue=3, max_num_seqs=2)
    yield engine
    engine.close()


class Waiter:
    """Collects the pieces of one request and knows when the last one came."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended = threading.Event()

    def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if piece.finish_reason is not None:
            assert not self.ended.is_set(), "a second last piece"
            self.ended.set()

    @property
    def reason(self) -> FinishReason | None:
        return self.pieces[-1].finish_reason


def long_ask(num_tokens: int = 20, max_tokens: int = 300) -> Generate:
    return Generate(random_prompt(num_tokens), GREEDY, max_tokens=max_tokens, ignore_eos=True)


def test_close_tells_everybody(tiny: TinyEngine) -> None:
    tiny.engine.start()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        tiny.engine.generate(long_ask(), waiter)
    tiny.engine.close()
    for waiter in waiters:
        assert waiter.ended.is_set()
        assert waiter.reason is FinishReason.ABORT
        assert isinstance(waiter.pieces[-1].error, EngineStoppedError)
    tiny.engine.cache.check_integrity()
    with pytest.raises(EngineStoppedError):
        tiny.engine.generate(long_ask(), Waiter())


def test_what_the_end_cuts_off_is_counted(tiny: TinyEngine, monkeypatch: Any) -> None:
    """Each accepted request reaches ``on_finish`` exactly once, the drain timeout included."""
    finished: list[Request] = []
    monkeypatch.setattr(tiny.engine, "_on_finish", finished.append)
    tiny.engine.start()
    waiters = [Waiter() for _ in range(3)]
    ids = [tiny.engine.generate(long_ask(), waiter) for waiter in waiters]
    assert not tiny.engine.drain(0.0)
    tiny.engine.close()
    assert sorted(request.sequence_id for request in finished) == ids
    assert {request.finish_reason for request in finished} == {FinishReason.ABORT}


def test_a_request_that_ends_before_it_is_taken_in_is_told(
    tiny: TinyEngine, monkeypatch: Any
) -> None:
    """The engine's thread may run as soon as the inbox has the request."""
    inbox, add = tiny.engine._inbox, tiny.engine._inbox.add

    def add_and_run(request: Request, num_waiting: int) -> None:
        add(request, num_waiting)
        while tiny.engine.step():
            pass

    monkeypatch.setattr(inbox, "add", add_and_run)
    waiter = Waiter()
    tiny.engine.generate_later(long_ask(max_tokens=2), waiter)
    assert waiter.reason is FinishReason.LENGTH
    assert not tiny.engine.has_requests


def test_a_request_that_the_queue_refuses_leaves_nothing(tiny: TinyEngine) -> None:
    for _ in range(3):
        tiny.engine.generate_later(long_ask(max_tokens=1), Waiter())
    with pytest.raises(QueueFullError):
        tiny.engine.generate_later(long_ask(), Waiter())
    tiny.run()
    assert not tiny.engine.has_requests


def test_drain_lets_running_requests_end(tiny: TinyEngine) -> None:
    tiny.engine.start()
    waiter = Waiter()
    tiny.engine.generate(long_ask(max_tokens=30), waiter)
    assert tiny.engine.drain(30.0)
    assert waiter.reason is FinishReason.LENGTH
    assert sum(len(piece.token_ids) for piece in waiter.pieces) == 30


def test_cancel_gives_a_last_piece_and_all_blocks(tiny: TinyEngine) -> None:
    waiters = [Waiter(), Waiter()]
    ids = [tiny.engine.generate_later(long_ask(), waiter) for waiter in waiters]
    tiny.engine.step()
    tiny.engine.cancel(ids[0])
    tiny.engine.cancel(SequenceId(999))
    tiny.engine.step()
    assert waiters[0].reason is FinishReason.ABORT
    tiny.engine.cancel(ids[0])
    tiny.run()
    assert waiters[1].reason is FinishReason.LENGTH


def num_held(tiny: TinyEngine) -> int:
    return sum(group.num_held for group in tiny.engine.cache.stats().groups)


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_blocks_are_back_in_the_step_after_a_cancellation(
    checkpoint: Path, key_file: Path, state: str
) -> None:
    """Another request goes on meanwhile; after one step only its blocks are held."""
    tiny = TinyEngine(checkpoint, key_file, num_blocks=60, max_num_batched_tokens=64)
    tiny.engine.generate_later(long_ask(20, 300), Waiter())
    waiter = Waiter()
    gone = tiny.engine.generate_later(long_ask(200, 100), waiter)
    num_steps = 2 if state == "prefilling" else 8
    for _ in range(num_steps):
        tiny.engine.step()
    assert bool(waiter.pieces and waiter.pieces[-1].token_ids) is (state == "decoding")
    other = -(-(20 + num_steps - 1) // 16)  # its prompt in the first step, then a token in each
    assert num_held(tiny) > other + 2
    tiny.engine.cancel(gone)
    assert waiter.reason is None
    tiny.engine.step()
    assert waiter.reason is FinishReason.ABORT
    assert num_held(tiny) == -(-(20 + num_steps) // 16)
    tiny.run()
    tiny.close()


def test_a_request_cancelled_before_its_first_step_is_told(tiny: TinyEngine) -> None:
    waiter = Waiter()
    tiny.engine.cancel(tiny.engine.generate_later(long_ask(), waiter))
    tiny.run()
    assert waiter.reason is FinishReason.ABORT
    assert not tiny.engine.has_requests


def test_a_receiver_that_raises_harms_nobody(tiny: TinyEngine) -> None:
    def broken(piece: Piece) -> None:
        raise ValueError("a receiver's own mistake")

    waiter = Waiter()
    tiny.engine.generate_later(long_ask(max_tokens=5), broken)
    tiny.engine.generate_later(long_ask(max_tokens=5), waiter)
    tiny.run()
    assert waiter.reason is FinishReason.LENGTH


class FailingOnce:
    """An executor whose next step fails."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.failures_left = 1

    def submit(self, plan: StepPlan) -> StepId:
        if self.failures_left:
            self.failures_left -= 1
            raise MemoryError("no memory for this step")
        return self._inner.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(tiny: TinyEngine) -> None:
    loop = tiny.engine.loop
    loop.executor = FailingOnce(loop.executor)
    first, second = Waiter(), Waiter()
    tiny.engine.generate_later(long_ask(max_tokens=3), first)
    tiny.engine.step()
    assert first.reason is FinishReason.ERROR
    assert "no memory" in str(first.pieces[-1].error)
    tiny.engine.generate_later(long_ask(max_tokens=3), second)
    tiny.run()
    assert second.reason is FinishReason.LENGTH


def test_what_cannot_be_served_is_refused_at_the_door(tiny: TinyEngine) -> None:
    for ask, error in (
        (Generate([], GREEDY), RequestError),
        (Generate([1], GREEDY, stop=("",)), RequestError),
        (long_ask(20, 5000), TooLongError),
    ):
        with pytest.raises(error):
            tiny.engine.generate_later(ask, Waiter())
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        tiny.engine.generate_later(long_ask(max_tokens=2), waiter)
    with pytest.raises(QueueFullError):
        tiny.engine.generate_later(long_ask(), Waiter())
    tiny.run()
    assert all(waiter.reason is FinishReason.LENGTH for waiter in waiters)


def test_max_tokens_defaults_to_what_fits(tiny: TinyEngine) -> None:
    waiter = Waiter()
    ask = Generate(random_prompt(30), GREEDY, ignore_eos=True)
    tiny.engine.generate_later(ask, waiter)
    tiny.run()
    room = min(512, 59 * 16)  # the context of the tiny model, and the pool
    assert waiter.pieces[-1].usage.num_output_tokens == room - 30


def test_a_bug_in_the_engines_thread_leaves_nobody_waiting(tiny: TinyEngine) -> None:
    def broken(now_ns: int) -> StepPlan:
        raise AssertionError("a bug")

    tiny.engine.scheduler.plan = broken
    waiters = [Waiter(), Waiter()]
    for waiter in waiters:
        tiny.engine.generate_later(long_ask(), waiter)
    tiny.engine.start()
    assert all(waiter.ended.wait(10) for waiter in waiters)
    assert all(waiter.reason is FinishReason.ERROR for waiter in waiters)
    assert tiny.engine.is_draining
    with pytest.raises(EngineStoppedError):
        tiny.engine.generate(long_ask(), Waiter())
