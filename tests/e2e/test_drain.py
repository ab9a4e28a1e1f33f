"""SIGTERM as clients see it: 503 for what is new, an end for what runs, nobody cut off."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.live_server import LiveServer
from pagemill.server import run
from pagemill.server.stream import EventStream

LONG = {"prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 4000, "ignore_eos": True}


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    request = server.http.build_request("POST", path, json={**body, "stream": True})
    return server.http.send(request, stream=True)


def data_of(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@contextmanager
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged as an error, and no traceback at all."""
    with caplog.at_level(logging.DEBUG):
        yield
    for record in caplog.records:
        assert record.levelno < logging.ERROR and not record.exc_info, record.getMessage()
    assert "loop is closed" not in caplog.text


def check_503(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "service_unavailable_error"


def test_a_drain_tells_everybody(
    start_server: Callable[..., LiveServer], smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two streams and a whole answer outlast the drain time; all get an error of the API."""
    server = start_server(smollm2, num_blocks=900, drain_timeout_s=4.0)
    whole: list[httpx.Response] = []
    client = threading.Thread(
        target=lambda: whole.append(
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
        )
    )
    with no_complaints(caplog):
        text = streamed(server, "/v1/completions", LONG)
        chat = streamed(server, "/v1/chat/completions", CHAT)
        lines = [answer.iter_lines() for answer in (text, chat)]
        for line in lines:
            assert next(line).startswith("data: ")
        client.start()
        while server.engine.scheduler.num_running < 3:
            time.sleep(0.005)
        server.running.stop()
        while not server.engine.is_draining:
            time.sleep(0.001)
        for path, body in (("/v1/completions", LONG), ("/v1/chat/completions", CHAT)):
            check_503(httpx.post(server.url + path, json=body))
            check_503(httpx.post(server.url + path, json={**body, "stream": True}))
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert server.engine.scheduler.num_running == 3, "the drain has not ended yet"
        for line in lines:
            *_, last, done = data_of(line)
            assert done == "[DONE]"
            error = json.loads(last)["error"]
            assert error["type"] == "service_unavailable_error"
            assert "before this answer was complete" in error["message"]
        client.join()
        check_503(whole[0])
        server.thread.join(30)
        assert not server.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_what_ends_within_the_drain_time_is_whole(
    start_server: Callable[..., LiveServer], smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(smollm2, num_blocks=20, drain_timeout_s=60.0)
    with no_complaints(caplog):
        answer = streamed(server, "/v1/completions", {**LONG, "max_tokens": 12})
        lines = answer.iter_lines()
        next(lines)
        server.running.stop()
        *_, last, done = data_of(lines)
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_an_idle_server_stops_at_once(
    start_server: Callable[..., LiveServer], smollm2: Path
) -> None:
    server = start_server(smollm2, num_blocks=20, drain_timeout_s=3600.0)
    server.running.stop()
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_half_a_body_is_told_at_the_end(
    start_server: Callable[..., LiveServer],
    smollm2: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client that stops in the middle of its request holds the end up for a moment only."""
    monkeypatch.setattr(run, "LAST_WORDS_S", 1)
    server = start_server(smollm2, num_blocks=20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.running.port), timeout=30) as connection:
        connection.sendall(head + b'{"prompt": ')
        time.sleep(0.2)
        server.running.stop()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    server.thread.join(30)
    assert not server.thread.is_alive()
    assert answer.startswith(b"HTTP/1.1 503")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "service_unavailable_error"
    assert not any(record.exc_info for record in caplog.records)


def test_a_reader_that_hangs_is_given_up_at_the_end() -> None:
    ended: list[bool] = []

    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def one_event() -> AsyncIterator[bytes]:
        yield b"data: 1"

    async def serve() -> None:
        stream = EventStream(one_event(), lambda: ended.append(True))
        task = asyncio.ensure_future(stream({}, hang, hang))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(serve())
    assert ended == [True]
