"""What an operator sets for clients, keys of any letters, and calls to an engine that has ended."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from model.tiny_engine import TinyEngine, tiny_checkpoint
from pagemill.cache.manager import CacheManager
from pagemill.core.config import ServerConfig
from pagemill.core.errors import ConfigError, EngineStoppedError, RequestError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.core.retention import DEFAULT_BAND, Retention
from pagemill.models.template import ChatTemplate
from pagemill.server.convert import Converter
from pagemill.server.errors import HttpError
from pagemill.server.protocol import ChatBody, CompletionBody, DropBody
from pagemill.server.retention import retention_of
from pagemill.server.tenants import Tenants, tenant_of


def asked(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt="x", **fields)


def test_a_request_asks_for_no_higher_band_than_the_server_takes() -> None:
    assert retention_of(asked(cache_priority=50), 50).band == 50
    with pytest.raises(RequestError, match="cache_priority is 51: give 0 to 50"):
        retention_of(asked(cache_priority=51), 50)
    assert retention_of(asked(), 50).band == DEFAULT_BAND
    assert retention_of(asked(), 10).band == 10
    assert retention_of(asked(cache_priority=100)).band == 100
    with pytest.raises(ConfigError, match="max_cache_priority"):
        ServerConfig(max_cache_priority=101)


def from_client(key: bytes) -> Request:
    headers = [(b"authorization", b"Bearer " + key)]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize("key", ["schlüssel", "à", "ключ", "鍵", "😀", "\udcff"])
def test_keys_of_any_letters_work_or_give_401(key: str) -> None:
    tenants = Tenants(ServerConfig(api_keys=(key, "plain"), operator_key="naïve"))
    sent = key.encode("utf-8", "replace")
    assert tenants.tenant(from_client(sent)) == tenant_of(key)
    assert tenants.tenant(from_client(b"plain")) == tenant_of("plain")
    assert tenants.operator(from_client("naïve".encode())) == ""
    for wrong in (sent + b"\xff", b"\xff\xfe", b"\xc3", "naïve".encode("latin-1"), b""):
        with pytest.raises(HttpError) as told:
            tenants.tenant(from_client(wrong))
        assert told.value.status == 401
        with pytest.raises(HttpError) as told:
            tenants.operator(from_client(wrong))
        assert told.value.status == 403


class Letters:
    """A tokenizer of one token a letter."""

    max_token_characters, vocab_size = 1, 1 << 20

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_chat_made_with_template_variables_is_dropped_by_them() -> None:
    template = ChatTemplate(
        "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}",
        {},
    )
    converter = Converter(Letters(), template, 100)  # type: ignore[arg-type]
    said = [{"role": "user", "content": "hi"}]
    fields: dict[str, Any] = {
        "messages": said,
        "chat_template_kwargs": {"mood": "calm"},
        "add_generation_prompt": False,
    }
    ask = converter.chat(ChatBody(**fields), "")
    assert converter.dropped_prompt(DropBody(**fields)) == ask.token_ids == [*map(ord, "calmhi")]
    assert converter.dropped_prompt(DropBody(messages=said)) == [*map(ord, "hi!")]  # type: ignore[arg-type]


def test_a_call_to_an_engine_that_has_just_ended_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyEngine(tiny_checkpoint(tmp_path, "llama"), tmp_path / "key")
    engine = run.engine
    engine.start()
    assert engine.call(lambda cache: cache.evict(0, 0)).result(10) == 0  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.call(lambda cache: 1)
    monkeypatch.setattr(engine._thread, "is_alive", lambda: True)  # as it was a moment before
    with pytest.raises(EngineStoppedError):
        engine.call(lambda cache: 1)


def test_dropped_pins_are_counted() -> None:
    cache = CacheManager(CacheConfig((LayerGroup("full", (0,)),), (11,)))
    for i in range(3):
        prompt = array("I", [i] * 65)
        root = cache.namespace()
        table = cache.open(cache.peek_match(prompt, root), root)
        cache.retain(table, Retention(is_pinned=True), 1)
        assert cache.extend(table, 65) is not None
        cache.commit(table, prompt, 64)
        cache.release(table)
    assert cache.num_dropped_pins() > 0
