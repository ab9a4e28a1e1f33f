"""Small models of other families behind the same server: templates, windows, characters."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.checkpoints import SPECIAL, random_model, random_prompt, save_folder, tiny_tokenizer
from model.live_server import LiveServer
from pagemill.core.step import SequenceResult, StepResult
from pagemill.core.types import StepId
from pagemill.engine import engine
from pagemill.models.tokenizer import REPLACEMENT, IncrementalDetokenizer

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


# ---------------------------------------------------------------- characters of several tokens

TEXT = "Grüße, 世界! 🌍🙂 e\u0301 日本 end"


class Scripted:
    """An executor that runs every step and then says the tokens of a script instead, or its own
    where there is none; it keeps what was said."""

    def __init__(self, inner: Any, script: list[int] | None) -> None:
        self._inner = inner
        self._script = script
        self.said: list[int] = []

    def collect(self, step_id: StepId) -> StepResult:
        result: StepResult = self._inner.collect(step_id)
        return replace(result, sequences=tuple(self._say(s) for s in result.sequences))

    def _say(self, one: SequenceResult) -> SequenceResult:
        if one.token_id is None:
            return one
        token_id = one.token_id if self._script is None else self._script[len(self.said)]
        self.said.append(token_id)
        return replace(one, token_id=token_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def says(plain: LiveServer) -> Iterator[Callable[[list[int] | None], Scripted]]:
    loop = plain.engine.loop
    inner = loop.executor

    def script(token_ids: list[int] | None) -> Scripted:
        loop.executor = Scripted(inner, token_ids)
        return loop.executor

    yield script
    loop.executor = inner


def streamed(server: LiveServer, **more: Any) -> list[str]:
    """The text of each event."""
    body = {"prompt": "x", "ignore_eos": True, "stream": True, **more}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["text"] for line in lines]


def cut_script(server: LiveServer) -> list[int]:
    """Tokens of TEXT; nearly each character beyond ASCII is cut into several of them."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    cuts = [i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith(REPLACEMENT)]
    assert len(cuts) >= 10, "the tokens cut no characters: the test would prove nothing"
    return ids


def test_a_character_is_shown_when_its_last_byte_has_come(
    plain: LiveServer, says: Callable[[list[int] | None], Scripted]
) -> None:
    """For an answer that ends anywhere, inside a character too: no piece shows a broken one."""
    ids = cut_script(plain)
    for length in range(1, len(ids) + 1):
        said = says(ids[:length]).said
        pieces = streamed(plain, max_tokens=length)
        assert said == ids[:length]
        assert not any(REPLACEMENT in piece for piece in pieces)
        text = "".join(pieces)
        assert TEXT.startswith(text)
        assert text == plain.engine.tokenizer.decode(said).rstrip(REPLACEMENT)
    assert text == TEXT


def test_decoding_token_by_token_is_noticed(
    plain: LiveServer,
    says: Callable[[list[int] | None], Scripted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: each token decoded alone shows broken characters."""

    class TokenByToken(IncrementalDetokenizer):
        def push(self, token_id: int) -> str:
            return self._decode([token_id])

    monkeypatch.setattr(engine, "IncrementalDetokenizer", TokenByToken)
    ids = cut_script(plain)
    says(ids)
    pieces = streamed(plain, max_tokens=len(ids))
    assert any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) != TEXT


def test_random_bytes_stream_as_they_decode(
    plain: LiveServer, says: Callable[[list[int] | None], Scripted]
) -> None:
    """A random model writes bytes that make no characters: pieces add up to the text of its
    tokens, with replacement signs where they are real."""
    tokenizer = plain.engine.tokenizer
    assert tokenizer is not None
    num_signs = 0
    for seed in range(5):
        said = says(None).said
        text = "".join(streamed(plain, max_tokens=60, temperature=2.0, seed=seed))
        assert len(said) == 60
        whole = tokenizer.decode(said)
        assert whole.startswith(text) and not whole[len(text) :].strip(REPLACEMENT)
        num_signs += text.count(REPLACEMENT)
    assert num_signs > 10


def test_a_token_without_an_embedding_is_400_and_the_others_go_on(
    start_server: Callable[..., LiveServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As the tokenizers of published Gemma 3 folders have one."""
    folder = folder_with(tmp_path_factory, "gemma3", "{{ messages[0].content }}")
    tokens = tiny_tokenizer()
    tokens.add_special_tokens(["<image_soft_token>"])
    tokens.save(str(folder / "tokenizer.json"))
    server = start_server(folder, num_blocks=100)
    chat = {"messages": [{"role": "user", "content": "x <image_soft_token>"}], "max_tokens": 2}
    body = {"prompt": "hi", "max_tokens": 2}
    wrong = (
        ("/v1/completions", {**body, "prompt": "x <image_soft_token>"}, "<image_soft_token>"),
        ("/v1/completions", {**body, "prompt": [5, 384]}, "384"),
        ("/v1/completions", {**body, "stop_token_ids": [384]}, "384"),
        ("/v1/completions", {**body, "logit_bias": {"384": 1}}, "384"),
        ("/v1/chat/completions", chat, "<image_soft_token>"),
    )
    for path, asked, words in wrong:
        answer = server.post(path, asked)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert server.post("/v1/completions", body).status_code == 200
