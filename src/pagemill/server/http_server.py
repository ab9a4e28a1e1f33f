"""uvicorn, with two habits of its own changed: what signals do, and what broken HTTP gets."""

import asyncio
import json
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from pagemill.server.errors import error_value

BROKEN_HTTP = "this is no valid HTTP/1.1 request"


class HttpServer(uvicorn.Server):
    """Hands signals on instead of closing the port at once: the engine drains first."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn's own handlers, in the main thread."""
        self._on_signal(sig)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """A bad request line or broken headers reach no route: they get the error shape here."""

    transport: asyncio.Transport

    def send_400_response(self, msg: str) -> None:
        """``msg`` is uvicorn's word for it; the connection is closed after the answer."""
        value = error_value(f"{BROKEN_HTTP}: {msg}", "invalid_request_error", None, None)
        self.transport.write(raw_answer(400, "Bad Request", value))
        self.transport.close()


def raw_answer(status: int, reason: str, value: dict[str, Any]) -> bytes:
    """A whole HTTP/1.1 answer with a JSON body, for where no application has been called."""
    body = json.dumps(value).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
