"""Pieces from the engine's thread to a coroutine, and events to a client that may leave."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.core.types import SequenceId
from pagemill.engine.engine import Engine, Generate, Piece

LOG = logging.getLogger("pagemill.server")


class PieceStreams:
    """The pieces of one or more prompts of one HTTP request, as (prompt index, piece).

    Bounded: a prompt gives at most one piece a token. Leaving the context cancels what still runs.
    """

    def __init__(self, engine: Engine, asks: Sequence[Generate]) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, SequenceId] = {}
        try:
            for index, ask in enumerate(asks):
                self._running[index] = engine.generate(ask, self._receiver(index))
        except Exception:
            self.close()
            raise

    def _receiver(self, index: int) -> Callable[[Piece], None]:
        def receive(piece: Piece) -> None:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))
            except RuntimeError:  # the loop was closed by force: nobody reads any more
                LOG.debug("a piece came after the end")

        return receive

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        while self._running:
            index, piece = await self._queue.get()
            if piece.finish_reason is not None:
                self._running.pop(index, None)
            yield index, piece

    def close(self) -> None:
        """Cancel the prompts that have not ended; their blocks are back within a step."""
        for sequence_id in self._running.values():
            self._engine.cancel(sequence_id)
        self._running.clear()


async def until_gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def or_gone(request: Request, work: Awaitable[Response]) -> Response:
    """The answer, or an empty one when the client leaves first; then the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return Response(status_code=499)
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events that notice a client who leaves even while nothing is being sent."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(self._gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the end of the process: nothing is left to be done here
            LOG.warning("a client did not read its last events in time")
        finally:
            for task in (sending, gone):
                task.cancel()
            outcomes = await asyncio.gather(sending, gone, return_exceptions=True)
            self._on_end()
            if isinstance(outcomes[0], Exception) and not isinstance(outcomes[0], OSError):
                LOG.error("a stream failed", exc_info=outcomes[0])

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
