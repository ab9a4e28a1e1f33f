"""A newcomer talks to the real model through the openai client."""

from collections.abc import Callable
from pathlib import Path

import pytest

from model.live_server import LiveServer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., LiveServer], smollm2: Path) -> LiveServer:
    return start_server(smollm2)


def test_a_chat_answers(server: LiveServer) -> None:
    answer = server.client().chat.completions.create(
        model="tested", messages=QUESTION, temperature=0, max_tokens=8
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_a_stream_gives_the_same_text_and_usage(server: LiveServer) -> None:
    client = server.client()
    whole = client.chat.completions.create(
        model="tested", messages=QUESTION, temperature=0, max_tokens=12
    )
    chunks = list(
        client.chat.completions.create(
            model="tested",
            messages=[
                {"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}
            ],
            temperature=0,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_the_cache_is_used_and_counted(server: LiveServer) -> None:
    before = server.metric("prefix_cache_hits")
    prompt = "A long story about a mill on a river. " * 20
    client = server.client()
    first = client.completions.create(model="tested", prompt=prompt, max_tokens=2, temperature=0)
    again = client.completions.create(model="tested", prompt=prompt, max_tokens=2, temperature=0)
    assert first.choices[0].text == again.choices[0].text
    details = again.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert details.cached_tokens == again.usage.prompt_tokens - 1
    assert server.metric("prefix_cache_hits") - before == details.cached_tokens


def test_another_cache_salt_finds_nothing(server: LiveServer) -> None:
    body = {"prompt": "Salt keeps prompts apart. " * 10, "max_tokens": 1, "temperature": 0}
    for salt, hit in (("one", False), ("one", True), ("two", False)):
        usage = server.post("/v1/completions", {**body, "cache_salt": salt}).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is hit


def test_eight_streams_at_once_equal_one_after_another(server: LiveServer) -> None:
    prompts = [f"Count upwards from {i}: {i}, {i + 1}, {i + 2}," for i in range(8)]
    body = {"max_tokens": 12, "temperature": 0}
    alone = [
        server.post("/v1/completions", {**body, "prompt": p, "cache_salt": p}).json()["choices"][0]
        for p in prompts
    ]
    together = server.post("/v1/completions", {**body, "prompt": prompts}).json()["choices"]
    assert [c["index"] for c in together] == list(range(8))
    assert [c["text"] for c in together] == [c["text"] for c in alone]


def test_priority_and_unknown_fields_are_taken(server: LiveServer) -> None:
    before = server.metric("unknown_request_fields") if _has_unknown(server) else 0.0
    body = {"prompt": "a b c", "max_tokens": 1, "priority": 3, "a_field_of_tomorrow": True}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.metric("unknown_request_fields") == before + 1


def _has_unknown(server: LiveServer) -> bool:
    return "unknown_request_fields_total{" in server.http.get("/metrics").text
