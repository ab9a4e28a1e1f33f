"""Bad input: each gets a clear error and its status, the server stays up, no block is lost."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from model.live_server import LiveServer
from pagemill.server.protocol import ChatBody, CompletionBody, TokenizeBody

OK = {"prompt": "one two three", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., LiveServer], smollm2: Path) -> LiveServer:
    return start_server(smollm2, num_blocks=200, api_keys=("secret",), max_model_len=1024)


@pytest.fixture(autouse=True)
def stays_up(server: LiveServer) -> Any:
    server.http.headers["Authorization"] = "Bearer secret"
    yield
    server.http.headers["Authorization"] = "Bearer secret"
    assert server.post("/v1/completions", OK).status_code == 200
    server.wait_idle()


def check_error(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "words", "param"),
    [
        ({"max_tokens": -1}, "max_tokens is -1", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0", "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens"),
        ({"max_tokens": True}, "max_tokens", "max_tokens"),
        ({"max_tokens": 100_000}, "context of 1024", None),
        ({"temperature": -0.5}, "temperature is -0.5", "temperature"),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"top_p": 0}, "top_p is 0", "top_p"),
        ({"top_p": 1.5}, "top_p is 1.5", "top_p"),
        ({"top_k": -2}, "top_k is -2", "top_k"),
        ({"min_p": 2}, "min_p is 2", "min_p"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
        ({"logprobs": 1000}, "logprobs is 1000", "logprobs"),
        ({"logprobs": -1}, "logprobs is -1", "logprobs"),
        ({"seed": 1 << 70}, "seed", "seed"),
        ({"priority": 1 << 40}, "priority", "priority"),
        ({"stop": [f"stop {i}" for i in range(10_000)]}, "10000 stop strings", "stop"),
        ({"stop": ""}, "stop string is empty", "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "stop_token_ids"),
        ({"stop": "x" * 5000}, "5000 characters", "stop"),
        ({"logit_bias": {"cat": 1}}, "not a token id", "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "99999999", "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "not a token id", "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "[-100, 100]", "logit_bias"),
        ({"cache_salt": "\ud800"}, "cache_salt", "cache_salt"),
        ({"stop": "a\udfff"}, "stop holds a lone surrogate", "stop"),
        ({"stop": ["ok", "\ud800"]}, "stop holds a lone surrogate", "stop"),
        ({"stop": [1]}, "a text or a list of texts", "stop"),
        ({"request_id": "\ud800"}, "request_id holds a lone surrogate", "request_id"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0", "max_completion_tokens"),
        ({"ignore_eos": "no"}, "ignore_eos", "ignore_eos"),
        ({"prompt": ""}, "empty", "prompt"),
        ({"prompt": []}, "empty", "prompt"),
        ({"prompt": [[]]}, "empty", "prompt"),
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": 7}, "give a text, a list of texts", "prompt"),
        ({"prompt": [1, "a"]}, "prompt: give a text, a list of texts, a list of token", "prompt"),
        ({"prompt": [1, 2.5]}, "a list of token ids", "prompt"),
        ({"prompt": [1, True]}, "a list of token ids", "prompt"),
        ({"prompt": ["a", [1]]}, "a list of such lists", "prompt"),
        ({"prompt": [10_000_000]}, "10000000", "prompt"),
        ({"prompt": [-1]}, "token ids (0 or more)", "prompt"),
        ({"prompt": ["ok"] * 1000}, "1000 prompts", "prompt"),
        ({"prompt": "word " * 3000}, "context of 1024", None),
        ({"prompt": "x" * 2_000_000}, "characters", "prompt"),
        ({"prompt": "a\ud800b"}, "lone surrogate", "prompt"),
        ({"prompt": ["ok", "\udc00"]}, "lone surrogate", "prompt"),
        ({"n": 2}, "n is not supported", "n"),
        ({"best_of": 2}, "best_of is not supported", "best_of"),
        ({"suffix": "end"}, "suffix is not supported", "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"stream_options": 3}, "stream_options", "stream_options"),
    ],
)
def test_a_wrong_field_is_named(
    server: LiveServer, change: dict[str, Any], words: str, param: str | None
) -> None:
    body = json.dumps({**OK, **change})
    answer = server.http.post("/v1/completions", content=body)
    check_error(answer, 400, words, param=param)


@pytest.mark.parametrize(
    ("change", "words", "param"),
    [
        ({"messages": []}, "messages is empty", "messages"),
        ({"messages": "hi"}, "messages", "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role", "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "content", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "text parts only",
            "messages",
        ),
        ({"tool_choice": "auto"}, "tool_choice is not supported", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0", "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0: ask for at least 1", "max_tokens"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate", "messages"),
        ({"messages": None}, "messages", "messages"),
        ({"max_completion_tokens": -5}, "max_completion_tokens is -5", "max_completion_tokens"),
        ({"top_logprobs": 3}, "needs logprobs", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs is 50", "top_logprobs"),
        ({"n": 3}, "n is not supported", "n"),
    ],
)
def test_a_wrong_chat_is_named(
    server: LiveServer, change: dict[str, Any], words: str, param: str
) -> None:
    body = json.dumps({**CHAT, **change})
    answer = server.http.post("/v1/chat/completions", content=body)
    check_error(answer, 400, words, param=param)


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/completions", CompletionBody, {**OK, "max_tokens": None}),
        ("/v1/chat/completions", ChatBody, {**CHAT, "max_completion_tokens": 2}),
        ("/tokenize", TokenizeBody, {"prompt": "a b"}),
    ],
)
def test_null_means_the_default(
    server: LiveServer, path: str, kind: type[BaseModel], body: dict[str, Any]
) -> None:
    """Every optional field as null, one at a time and all at once."""
    optional = {n: None for n, f in kind.model_fields.items() if not f.is_required()}
    assert len(optional) > 5
    given = {key: value for key, value in body.items() if value is not None}
    if path != "/tokenize":
        given["temperature"] = 0
    want = server.post(path, given).json()
    for nulls in (optional, *({name: None} for name in optional if name not in given)):
        answer = server.post(path, {**nulls, **given})
        assert answer.status_code == 200, (nulls, answer.text)
        got = answer.json()
        assert got.get("tokens") == want.get("tokens")
        if "usage" in want:
            assert got["choices"] == want["choices"], nulls


def test_null_in_stream_options_means_the_default(server: LiveServer) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = {**OK, "stream": True, "stream_options": options}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in answer.text


BROKEN_HTTP = (
    b"NONSENSE\r\n\r\n",
    b"GET /health HTTX/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nno colon here\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nBad\x00Name: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting \r\n\r\n",
)


@pytest.mark.parametrize("data", BROKEN_HTTP, ids=[repr(data[:20]) for data in BROKEN_HTTP])
def test_broken_http_has_the_error_shape(server: LiveServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.running.port), timeout=30) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 400")
    assert b"content-type: application/json" in lines and b"connection: close" in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "HTTP" in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000]
)
def test_broken_json_is_refused(server: LiveServer, body: bytes) -> None:
    check_error(server.http.post("/v1/completions", content=body), 400, "JSON")


def test_numbers_that_are_too_big_are_refused(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}"
    assert server.http.post("/v1/completions", content=body).status_code == 400


def test_control_characters_are_only_text(server: LiveServer) -> None:
    body = {**OK, "prompt": "a\x00b\x07\x1b[31m\u202e"}
    assert server.post("/v1/completions", body).status_code == 200


def test_an_unknown_model_is_404(server: LiveServer) -> None:
    check_error(server.post("/v1/completions", {**OK, "model": "gpt-9"}), 404, "gpt-9", "tested")
    check_error(server.http.get("/v1/models/gpt-9"), 404, "gpt-9")
    assert server.http.get("/v1/models/tested").status_code == 200


def test_unknown_paths_and_methods_have_the_error_shape(server: LiveServer) -> None:
    check_error(server.http.get("/v1/nothing"), 404, "/v1/nothing")
    check_error(server.http.get("/v1/completions"), 405, "GET")
    for path in ("/v1/completions/", "/v1/chat/completions/", "/tokenize/"):
        answer = server.http.post(path, json=OK)
        check_error(answer, 404, path)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic secret", "Bearer", "secret"])
def test_a_wrong_key_is_401(server: LiveServer, header: str | None) -> None:
    del server.http.headers["Authorization"]
    headers = {} if header is None else {"Authorization": header}
    answer = server.http.post("/v1/completions", json=OK, headers=headers)
    check_error(answer, 401, "API key")
    assert server.http.get("/health").status_code == 200


def test_a_body_that_is_too_large_is_413(server: LiveServer) -> None:
    """2 MiB: 256 prompts of 1,024 tokens, 8 bytes each."""
    body = b'{"prompt": "' + b"a" * (2 << 20) + b'"}'
    check_error(server.http.post("/v1/completions", content=body), 413, "2097152 bytes", "1024")


def test_what_can_never_fit_the_pool_is_400(server: LiveServer) -> None:
    """199 blocks hold 3,184 tokens, the context is 1,024: prompt and limit together decide."""
    body = {"prompt": [5] * 1000, "max_tokens": 25}
    check_error(server.post("/v1/completions", body), 400, "1000 prompt tokens and 25 output")
    body = {"prompt": [5] * 1000, "max_tokens": 24, "temperature": 0}
    assert server.post("/v1/completions", body).status_code == 200


def test_detokenize_refuses_ids_outside_the_vocabulary(server: LiveServer) -> None:
    check_error(server.post("/detokenize", {"tokens": [123_456_789]}), 400, "123456789")
    text = "Grüße, 世界 🌍\n\tend"
    ids = server.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"] == text


def test_tokenize_takes_prompt_or_messages(server: LiveServer) -> None:
    check_error(server.post("/tokenize", {}), 400, "prompt or messages")
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}).json()
    assert chat["count"] > 3


def test_a_client_that_sends_half_a_request_and_leaves_does_no_harm(server: LiveServer) -> None:
    host, port = "127.0.0.1", server.running.port
    for data in (b"POST /v1/comp", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(data)


def test_many_bad_requests_at_once_change_nothing(server: LiveServer) -> None:
    bodies = [{**OK, "max_tokens": -1}, {**OK, "prompt": ""}, {**OK, "n": 5}, OK] * 8
    codes: list[int] = []

    def send(body: dict[str, Any]) -> None:
        answer = httpx.post(
            server.url + "/v1/completions",
            json=body,
            headers={"Authorization": "Bearer secret"},
            timeout=60,
        )
        codes.append(answer.status_code)

    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] * 8 + [400] * 24
