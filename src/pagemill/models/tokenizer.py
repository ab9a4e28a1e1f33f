"""Text <-> token ids, and text as it grows. Knows no request and no tensor; no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagemill.core.errors import MissingExtraError, ModelError, RequestError

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""
MAX_BYTES_OF_A_CHARACTER = 4


class TokenDecoder(Protocol):
    """The half of a tokenizer that an incremental detokenizer needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Tokenizer:
    """A face over the ``tokenizers`` library, with what a server needs to know around it."""

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        add_bos: bool,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        bos = special_tokens.get("bos_token")
        self._bos_id = backend.token_to_id(bos) if add_bos and bos else None
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        self.max_token_characters = 4 * max(map(len, backend.get_vocab()), default=1)
        """No token stands for more characters of text (4: a normalizer may join characters)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises RequestError for text that is no valid Unicode."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise RequestError(
                "the text holds a lone surrogate or is otherwise no valid Unicode; send valid UTF-8"
            ) from error
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids outside the vocabulary give nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token written as it stands in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found


class IncrementalDetokenizer:
    """Turns a growing run of token ids into text pieces that never show a broken character.

        0 ......... start ......... shown ......... len
        |  forgotten |  decoded again |  decoded, held back until it is whole text |

    Decoding starts again from ``start`` because a token's text can depend on its neighbours (a
    leading space). Held-back text is given out once it no longer ends in a replacement character,
    or once that can only be a real one (a character has at most four bytes).
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The new text after one more token; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._decode(self._start, self._shown)
        after = self._decode(self._start, len(self._ids))
        pending = len(self._ids) - self._shown
        if after.endswith(REPLACEMENT) and pending < 2 * MAX_BYTES_OF_A_CHARACTER:
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        self._trim()
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._decoder.decode(
            self._ids[start:end], skip_special_tokens=self._skip_special_tokens
        )

    def _trim(self) -> None:
        if self._start > 64:
            del self._ids[: self._start]
            self._shown -= self._start
            self._start = 0


# ---------------------------------------------------------------- where tokenizers come from


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("a tokenizer", "engine") from error
    return tokenizers


def from_folder(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. ``config`` is its tokenizer_config.json, or empty."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: save the model's fast tokenizer into the folder"
            " (tokenizer.save_pretrained), or use a GGUF file"
        )
    try:
        backend = _library().Tokenizer.from_file(str(path))
    except MissingExtraError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    template = config.get("chat_template")
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        template = jinja.read_text(encoding="utf-8")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return Tokenizer(
        backend,
        special_tokens={n: _token_text(config[n]) for n in names if config.get(n)},
        chat_template=template,
        add_bos=bool(config.get("add_bos_token", False)),
    )


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)
