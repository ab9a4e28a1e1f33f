"""Bodies made to be costly: one look, one error, and never in the server's own thread."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from pagemill.core.errors import RequestError, TooLongError
from pagemill.server import app, forms, protocol
from pagemill.server.app import App
from pagemill.server.forms import MAX_FIELDS, MAX_PROMPTS, max_body_bytes
from pagemill.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

CONTEXT = 8192
MANY = 300_000


class Counted(list[Any]):
    """A list that counts the elements which anybody looks at."""

    num_seen = 0

    def __iter__(self) -> Any:
        for value in super().__iter__():
            self.num_seen += 1
            yield value


@pytest.mark.parametrize("check", [forms.prompt_form, forms.stop_form, forms.tokens_form])
def test_one_pass_stops_at_the_first_wrong_element(check: Any) -> None:
    right: Any = "a" if check is forms.stop_form else 5
    value = Counted([right, right, None, *[right] * 1000])
    with pytest.raises(RequestError):
        check(value)
    assert value.num_seen == 3


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (CompletionBody, {"prompt": [5] * MANY + ["a"]}, "300001 prompt tokens"),
        (CompletionBody, {"prompt": [5] * 8000 + ["a"]}, "prompt: give a text, a list of texts"),
        (CompletionBody, {"prompt": [[5]] * 100_000 + ["a"]}, "100001 prompts"),
        (CompletionBody, {"prompt": [[5]] * 200 + ["a"]}, "prompt: give a text, a list of texts"),
        (CompletionBody, {"prompt": [[5] * 9000, [5]]}, "9000 prompt tokens"),
        (CompletionBody, {"prompt": ["a"] * MANY}, "300000 prompts"),
        (CompletionBody, {"prompt": "a", "stop": [5] * MANY}, "300000 stop strings"),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * MANY}, "300000 stop_token_ids"),
        (CompletionBody, {"prompt": "a", **dict.fromkeys(map(str, range(9999)))}, "10000 fields"),
        (
            CompletionBody,
            {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9999)), "x")},
            "logit_bias has over 1024",
        ),
        (CompletionBody, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias: give an object"),
        (CompletionBody, {"prompt": "a", "logit_bias": {"5": True}}, "logit_bias: give an object"),
        (ChatBody, {"messages": [{"role": "user"}] * 99_999}, "99999 messages: at most 8192"),
        (ChatBody, {"messages": [5] * CONTEXT}, "messages.0: give an object"),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * MANY}]}, "list of parts"),
        (ChatBody, {"messages": [{"role": "user"}], "tools": [5] * CONTEXT}, "tools: give a list"),
        (DetokenizeBody, {"tokens": [5] * MANY}, "300000 tokens: at most 8192"),
        (TokenizeBody, {"messages": [{"role": 5}] * CONTEXT}, "messages.0.role"),
    ],
)
def test_a_costly_body_gives_one_error(
    kind: type[Body], body: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-written checks refuse it: pydantic collects nothing."""
    monkeypatch.setattr(protocol, "_first_problem", lambda error: pytest.fail(str(error)[:500]))
    with pytest.raises(RequestError, match=words):
        parse(json.dumps(body).encode(), kind, CONTEXT)


@pytest.mark.parametrize("part", ["[5],", "{},", '{"a": 1},', "[[[]]],"])
def test_many_parts_are_refused_before_they_are_read(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    raw = f'{{"prompt": [{part * MANY}"a"]}}'.encode()
    with pytest.raises(RequestError, match="lists, objects and fields"):
        parse(raw, CompletionBody, CONTEXT)


def test_what_fits_is_taken() -> None:
    ids = [5] * CONTEXT
    for prompt in ("a", ids, [ids] * 3, ["a"] * MAX_PROMPTS):
        body = parse(json.dumps({"prompt": prompt}).encode(), CompletionBody, CONTEXT)
        assert body.prompt == prompt
    with pytest.raises(TooLongError):
        parse(json.dumps({"prompt": [*ids, 5]}).encode(), CompletionBody, CONTEXT)
    unknown = {f"field {i}": 1 for i in range(MAX_FIELDS - 1)}
    parse(json.dumps({"prompt": "a", **unknown}).encode(), CompletionBody, CONTEXT)


def test_the_limit_follows_the_context() -> None:
    assert max_body_bytes(64) == 1 << 20
    assert max_body_bytes(1024) == 256 * 1024 * 8
    assert max_body_bytes(1 << 20) == 16 << 20


def _request(raw: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_long_bodies_are_parsed_one_at_a_time_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs on while one is parsed; short ones need no thread and wait for nobody."""
    threads: list[threading.Thread] = []
    running, most, may_go = [0], [0], threading.Event()

    def slow(raw: bytes, kind: type[Body], max_model_len: int) -> Body:
        threads.append(threading.current_thread())
        running[0] += 1
        most[0] = max(most[0], running[0])
        if len(raw) > app.QUICK_BODY_BYTES:
            assert may_go.wait(30), "the loop stood still"
        running[0] -= 1
        return parse(raw, kind, max_model_len)

    monkeypatch.setattr(app, "parse", slow)

    async def check() -> None:
        own: Any = SimpleNamespace(
            _max_model_len=CONTEXT,
            _max_body_bytes=max_body_bytes(CONTEXT),
            _long_bodies=asyncio.Lock(),
            _check_model=lambda name: None,
        )
        own._read = lambda request: App._read(own, request)
        own._in_thread = lambda work, request: App._in_thread(own, work, request)

        def ask(text: str) -> Any:
            raw = json.dumps({"prompt": text}).encode()
            return App._body(cast(App, own), _request(raw), TokenizeBody)

        long = [asyncio.ensure_future(ask("a" * 20_000)) for _ in range(3)]
        while not threads:
            await asyncio.sleep(0.001)
        assert threads[0] is not threading.current_thread()
        assert (await ask("short")).prompt == "short"
        assert threads[-1] is threading.current_thread()
        may_go.set()
        await asyncio.gather(*long)

    asyncio.run(check())
    assert most[0] == 2, "one long body and the short one"
