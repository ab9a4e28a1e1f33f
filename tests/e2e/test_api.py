"""The rest of the API: sampling, stops, log-probabilities, echo, cancelling, queueing, metrics."""

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import RateLimitError

from model.live_server import LiveServer
from pagemill.core.types import SequenceId

PROMPT = "Once upon a time there was a mill by the river, and"
BODY = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., LiveServer], smollm2: Path) -> LiveServer:
    return start_server(smollm2, num_blocks=400, max_queue=4, max_num_seqs=4)


def text_of(server: LiveServer, **more: Any) -> str:
    answer = server.post("/v1/completions", {**BODY, **more})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def events(server: LiveServer, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stop_string_is_cut_and_never_shown(server: LiveServer) -> None:
    """Also across tokens: the stop is a piece from the middle of the answer."""
    whole = text_of(server)
    stop = whole[7:19]
    answer = server.post("/v1/completions", {**BODY, "stop": stop}).json()["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    pieces = [c["choices"][0]["text"] for c in events(server, {**BODY, "stop": [stop, "zzz"]})]
    assert "".join(pieces) == answer["text"]


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(server: LiveServer) -> None:
    whole = text_of(server)
    pieces = [
        c["choices"][0]["text"] for c in events(server, {**BODY, "stop": whole[-3:] + "never"})
    ]
    assert "".join(pieces) == whole


def test_stop_token_ids_and_ignore_eos(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": text_of(server)}).json()["tokens"]
    answer = server.post("/v1/completions", {**BODY, "stop_token_ids": [ids[5]]}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] in ids[:6]
    assert answer["usage"]["completion_tokens"] <= 6
    chat = {"messages": [{"role": "user", "content": "Say ok."}], "temperature": 0}
    ended = server.post("/v1/chat/completions", {**chat, "max_tokens": 60}).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    forced = server.post("/v1/chat/completions", {**chat, "max_tokens": 60, "ignore_eos": True})
    assert forced.json()["usage"]["completion_tokens"] == 60


def test_a_seed_repeats_and_temperature_varies(server: LiveServer) -> None:
    hot = {"temperature": 1.5, "max_tokens": 12}
    assert text_of(server, **hot, seed=5) == text_of(server, **hot, seed=5)
    different = {text_of(server, **hot, seed=seed) for seed in range(6)}
    assert len(different) > 3


def test_filters_leave_only_the_best_token(server: LiveServer) -> None:
    greedy = text_of(server)
    for only_best in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text_of(server, temperature=1.0, seed=3, **only_best) == greedy


def test_logit_bias_and_penalties_change_the_answer(server: LiveServer) -> None:
    first = server.post("/v1/completions", {**BODY, "max_tokens": 1, "logprobs": 2}).json()
    ids = server.post("/tokenize", {"prompt": first["choices"][0]["text"]}).json()["tokens"]
    banned = text_of(server, max_tokens=1, logit_bias={str(ids[0]): -100})
    assert banned != first["choices"][0]["text"]
    loop = {"prompt": "la la la la la la la la", "max_tokens": 24}
    plain = text_of(server, **loop)
    assert text_of(server, **loop, repetition_penalty=1.8) != plain
    assert text_of(server, **loop, frequency_penalty=2.0, presence_penalty=2.0) != plain


def test_logprobs_of_a_completion(server: LiveServer) -> None:
    choice = server.post("/v1/completions", {**BODY, "logprobs": 3}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert value == top[token] == max(top.values()) <= 0
        assert len(top) == 3
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


def test_echo_scores_the_prompt(server: LiveServer) -> None:
    """As lm-eval asks: no output, a log-probability for every prompt token but the first."""
    body = {**BODY, "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    values = choice["logprobs"]["token_logprobs"]
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert len(values) == len(ids) and values[0] is None
    generated = server.post("/v1/completions", {**BODY, "logprobs": 1}).json()["choices"][0]
    longer = {"prompt": [*ids, ids[0]], "max_tokens": 0, "echo": True, "logprobs": 1}
    again = server.post("/v1/completions", longer).json()["choices"][0]["logprobs"]
    assert again["token_logprobs"][1 : len(ids)] == pytest.approx(values[1:], abs=1e-3)
    both = server.post("/v1/completions", {**BODY, "echo": True, "logprobs": 1}).json()
    assert both["choices"][0]["text"] == PROMPT + generated["text"]


def test_a_long_prompt_is_scored_over_many_chunks(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "The mill turns. " * 300}).json()["tokens"]
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    values = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert len(values["token_logprobs"]) == len(ids) > 1000
    assert all(value <= 0 for value in values["token_logprobs"][1:])


def test_chat_logprobs(server: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Say ok."}],
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(c["token"] for c in content).startswith(choice["message"]["content"])
    assert all(len(c["top_logprobs"]) == 2 for c in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_continuous_usage_counts_up(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = events(server, {**BODY, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in got]
    assert counts == sorted(counts) and counts[-1] == 16
    assert got[-1]["choices"] == []


def test_batched_prompts_stream_side_by_side(server: LiveServer) -> None:
    body = {**BODY, "prompt": [PROMPT, "1, 2, 3,"], "max_tokens": 6}
    texts = ["", ""]
    for got in events(server, body):
        texts[got["choices"][0]["index"]] += got["choices"][0]["text"]
    alone = server.post("/v1/completions", body).json()["choices"]
    assert texts == [choice["text"] for choice in alone]


def test_tools_reach_the_template(
    start_server: Callable[..., LiveServer], smollm2: Path, tmp_path: Path
) -> None:
    """SmolLM2's own template ignores tools, so here is one that writes them."""
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
    own = start_server(smollm2, num_blocks=100, chat_template=template)
    tool = {"type": "function", "function": {"name": "turn_the_mill", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    ids = own.post("/tokenize", body).json()["tokens"]
    rendered = own.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert json.loads(rendered.removesuffix("hi")) == [tool]
    usage = own.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)


# ---------------------------------------------------------------- leaving, queueing


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to that")


def _start_stream(server: LiveServer, body: dict[str, Any]) -> httpx.Response:
    request = server.http.build_request("POST", "/v1/completions", json={**body, "stream": True})
    return server.http.send(request, stream=True)


@pytest.fixture
def steps_at_cancel(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps had been made when the engine was told that a client has left."""
    steps: list[int] = []
    cancel = server.engine.cancel

    def told(sequence_id: SequenceId) -> None:
        steps.append(server.engine.scheduler.stats.num_steps)
        cancel(sequence_id)

    monkeypatch.setattr(server.engine, "cancel", told)
    return steps


def check_one_step_later(server: LiveServer, steps_at_cancel: list[int]) -> None:
    """The step that ran when the client left was the last one: then all blocks were back."""
    server.wait_idle()
    assert len(steps_at_cancel) == 1
    assert server.engine.scheduler.stats.num_steps - steps_at_cancel[0] <= 1


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_a_client_that_leaves_frees_its_blocks(
    server: LiveServer, state: str, steps_at_cancel: list[int]
) -> None:
    long = {"prompt": list(range(5, 4005)), "max_tokens": 2000, "ignore_eos": True}
    short = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    before = server.engine.scheduler.stats.num_aborted
    answer = _start_stream(server, long if state == "prefilling" else short)
    lines = answer.iter_lines()
    if state == "decoding":
        next(lines)
    wait_until(lambda: server.engine.scheduler.num_running > 0)
    assert server.num_held_blocks() > 0
    answer.close()
    wait_until(lambda: server.engine.scheduler.stats.num_aborted == before + 1)
    check_one_step_later(server, steps_at_cancel)


def test_a_client_that_leaves_a_whole_answer_frees_its_blocks(
    server: LiveServer, steps_at_cancel: list[int]
) -> None:
    before = server.engine.scheduler.stats.num_aborted
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: server.engine.scheduler.stats.num_aborted == before + 1)
    check_one_step_later(server, steps_at_cancel)


def test_a_full_queue_answers_429_with_retry_after(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    answers = [_start_stream(server, body) for _ in range(4)]
    lines = [answer.iter_lines() for answer in answers]  # kept: a dropped one hangs up
    for line in lines:
        next(line)
    answers += [_start_stream(server, {**body, "prompt": [i]}) for i in range(4)]
    wait_until(lambda: server.engine.scheduler.num_waiting == 4)
    refused = server.post("/v1/completions", BODY)
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    with pytest.raises(RateLimitError):
        server.client().completions.create(model="tested", prompt="x")
    for answer in answers:
        answer.close()
    server.wait_idle()
    assert server.post("/v1/completions", BODY).status_code == 200


def test_a_batch_that_does_not_fit_the_queue_leaves_nothing_behind(server: LiveServer) -> None:
    refused = server.post("/v1/completions", {**BODY, "prompt": ["a"] * 100, "max_tokens": 300})
    assert refused.status_code == 429
    server.wait_idle()


# ---------------------------------------------------------------- metrics


def test_metrics_count_what_happened(server: LiveServer) -> None:
    before = {n: server.metric(n) for n in ("prompt_tokens", "generation_tokens")}
    usage = server.post("/v1/completions", BODY).json()["usage"]
    server.wait_idle()
    assert server.metric("prompt_tokens") - before["prompt_tokens"] == usage["prompt_tokens"]
    after = server.metric("generation_tokens") - before["generation_tokens"]
    assert after == usage["completion_tokens"]
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("request_success") > 0
    assert server.metric("integrity_checks") > 0


def test_the_vllm_prefix_gives_vllms_names(
    start_server: Callable[..., LiveServer], smollm2: Path
) -> None:
    server = start_server(smollm2, num_blocks=100, metrics_prefix="vllm")
    server.post("/v1/completions", {**BODY, "max_tokens": 3})
    text = server.http.get("/metrics").text
    labels = '{engine="0",model_name="tested"}'
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
    ):
        assert name + labels in text.replace('model_name="tested",engine="0"', labels[1:-1]), name
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in text
    assert "vllm:cache_config_info{" in text
    for name in ("estimated_flops", "integrity_checks", "unknown_request_fields"):
        assert "vllm:" + name not in text and "pagemill:" + name in text
    assert buckets(text, "vllm:inter_token_latency_seconds")[-5:] == [7.5, 10, 20, 40, 80]
    assert buckets(text, "vllm:e2e_request_latency_seconds")[11:] == [
        *(30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
    ]
    assert buckets(text, "vllm:request_prompt_tokens")[:6] == [1, 2, 5, 10, 20, 50]


def buckets(text: str, name: str) -> list[float]:
    """The finite upper bounds of a histogram."""
    bounds = re.findall(rf'^{name}_bucket{{.*le="([0-9.]+)"', text, re.MULTILINE)
    assert bounds, name
    return [float(bound) for bound in bounds]


def test_two_servers_live_in_one_process(
    start_server: Callable[..., LiveServer], smollm2: Path, server: LiveServer
) -> None:
    other = start_server(smollm2, num_blocks=100, prefix_index="off")
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda s=s: answers.append(text_of(s))) for s in (server, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1]
    assert other.post("/v1/completions", BODY).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0
    }
