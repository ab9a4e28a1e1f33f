"""Prompts of a log as token ids: a model's tokenizer and template, or plain ones."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.bench.explain_read import LoggedRequest
from pagemill.core.errors import ConfigError, MissingExtraError, RequestError
from pagemill.models import gguf_tokenizer, tokenizer
from pagemill.models.gguf import GgufFile
from pagemill.models.home import find_model, known_model_path
from pagemill.models.template import ChatTemplate

DEFAULT_MODEL = "smollm2-135m"
_WORDS = re.compile(r"\d|[^\W\d]+|\s+|[^\w\s]")


class Coder(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class PlainTokenizer:
    """Words, digits, runs of spaces and signs: close to a real tokenizer in where texts differ, not
    in how many tokens they have. Ids are given in the order of first sight."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        out = []
        for word in _WORDS.findall(text):
            token_id = self._ids.setdefault(word, len(self._words))
            if token_id == len(self._words):
                self._words.append(word)
            out.append(token_id)
        return out

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._words[i] for i in token_ids if i < len(self._words))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a server would have seen of a request."""

    text: str
    token_ids: NDArray[np.uint32]


class Prompts:
    """Renders and tokenizes requests. ``note`` says in words with what."""

    def __init__(self, coder: Coder, template: ChatTemplate | None, note: str) -> None:
        self.coder = coder
        self.note = note
        self._template = template

    def render(self, request: LoggedRequest) -> Prompt:
        """Raises ConfigError with the line where the template refuses the messages."""
        if request.token_ids:
            return Prompt("", np.array(request.token_ids, np.uint32))
        text = request.text
        if request.messages:
            try:
                text = self.chat_text(request)
            except RequestError as error:
                raise ConfigError(f"{request.where}: {error}") from error
        try:
            return Prompt(text, np.array(self.coder.encode(text), np.uint32))
        except RequestError as error:
            raise ConfigError(f"{request.where}: {error}") from error

    def chat_text(self, request: LoggedRequest) -> str:
        """What the template writes. Raises RequestError where it refuses the messages."""
        if self._template is None:
            return plain_chat(request)
        messages = [{**m, "content": content_text(m.get("content"))} for m in request.messages]
        return self._template.render(messages, tools=request.tools)

    def text_of(self, token_ids: Sequence[int] | NDArray[np.uint32]) -> str:
        return self.coder.decode([int(i) for i in token_ids], skip_special_tokens=False)


def content_text(content: Any) -> str:
    """The text of a message: a string, or the text parts of a list."""
    if isinstance(content, list):
        return "".join(str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in content)
    return "" if content is None else str(content)


def plain_chat(request: LoggedRequest) -> str:
    """Tools and messages one after another, for logs without a template."""
    parts = [json.dumps(tool, ensure_ascii=False) + "\n" for tool in request.tools]
    for message in request.messages:
        calls = message.get("tool_calls")
        more = json.dumps(calls, ensure_ascii=False) if calls else ""
        text = content_text(message.get("content"))
        parts.append(f"<|{message['role']}|>\n{text}{more}<|end|>\n")
    return "".join([*parts, "<|assistant|>\n"])


def load_prompts(model: str | None, template_file: Path | None) -> Prompts:
    """``model`` None: the small known model where it has been pulled, else the plain tokenizer.
    Raises ConfigError or ModelError for what was asked for and is not there."""
    source = _read(template_file) if template_file else None
    try:
        found = _model_tokenizer(model)
    except MissingExtraError:
        if model is not None:
            raise
        found = None
    if found is None:
        template = ChatTemplate(source, {}) if source else None
        return Prompts(PlainTokenizer(), template, _plain_note(template is not None))
    source = source or found.chat_template
    template = ChatTemplate(source, found.special_tokens) if source else None
    kind = "the file's" if template_file else "its" if template else "no"
    note = f"tokenizer of {model or DEFAULT_MODEL}, {kind} chat template"
    return Prompts(found, template, note)


def _plain_note(has_template: bool) -> str:
    template = "the file's chat template" if has_template else "a plain chat form"
    return (
        f"plain words as tokens and {template}: counts are rough; name your model with --model, or"
        f" run pagemill pull {DEFAULT_MODEL}"
    )


def _model_tokenizer(model: str | None) -> tokenizer.Tokenizer | None:
    if model is None and not known_model_path(DEFAULT_MODEL).is_file():
        return None
    path = find_model(model or DEFAULT_MODEL)
    if path.is_file():
        with GgufFile(path) as file:
            return gguf_tokenizer.from_gguf(file.metadata)
    settings = path / "tokenizer_config.json"
    try:
        config = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{settings} is no JSON: {error}") from error
    return tokenizer.from_folder(path, config)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error
