"""Small models of other families behind the same server: templates, windows, characters."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoints import SPECIAL, random_model, random_prompt, save_folder
from model.live_server import LiveServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def folder_with(tmp_path_factory: pytest.TempPathFactory, case: str, template: str | None) -> Path:
    folder = save_folder(random_model(case), tmp_path_factory.mktemp("model"))
    about = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": template}
    if template is None:
        del about["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def plain(
    start_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory
) -> LiveServer:
    """A base model: no chat template."""
    return start_server(folder_with(tmp_path_factory, "gemma3", None), num_blocks=100)


def test_a_model_without_a_template_says_the_way_out(plain: LiveServer) -> None:
    answer = plain.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "--chat-template" in message and "/v1/completions" in message
    assert plain.post("/tokenize", CHAT).status_code == 400
    body = {"prompt": "hello", "max_tokens": 3}
    assert plain.post("/v1/completions", body).status_code == 200


def test_a_template_that_refuses_is_400(
    start_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    server = start_server(folder_with(tmp_path_factory, "llama", template), num_blocks=100)
    answer = server.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]
    stream = server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert stream.status_code == 400


def test_tools_are_seen_by_a_template_that_uses_them(
    start_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    )
    server = start_server(folder_with(tmp_path_factory, "qwen3", template), num_blocks=100)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    ids = server.post("/tokenize", {**CHAT, "tools": [tool]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "weather;hi"


def test_windowed_layers_resend_computes_only_what_changed(plain: LiveServer) -> None:
    """Resend a prompt many windows long; then with three tokens changed near its end."""
    prompt = random_prompt(300)
    changed = [*prompt[:-20], 7, 8, 9, *prompt[-17:]]
    for ids, cached in ((prompt, 0), (prompt, 288), (changed, 272)):
        body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        usage = plain.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    plain.wait_idle()


def test_random_tokens_never_show_a_broken_character(plain: LiveServer) -> None:
    """A random model writes random bytes: streamed pieces add up, and are always whole text."""
    for seed in range(5):
        body = {
            "prompt": "x",
            "max_tokens": 60,
            "temperature": 2.0,
            "seed": seed,
            "ignore_eos": True,
        }
        whole = plain.post("/v1/completions", body).json()["choices"][0]["text"]
        pieces = []
        with plain.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        assert "".join(pieces) == whole
        assert whole.encode("utf-8").decode("utf-8") == whole
