"""Text <-> token ids, and text as it grows. Knows no request and no tensor; no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagemill.core.errors import MissingExtraError, ModelError, RequestError

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) a character."""
MAX_BYTES_OF_A_CHARACTER = 4
MAX_TOKEN_IDS = 1 << 32
MAX_BROKEN_TOKENS = 64
"""So many tokens without whole text are no text any more: what they give is shown as it is."""


class TokenDecoder(Protocol):
    """The half of a tokenizer that an incremental detokenizer needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Tokenizer:
    """A face over the ``tokenizers`` library, with what a server needs to know around it.

    ``num_embeddings``: rows of the model's embedding. A tokenizer may know more tokens than these
    (multimodal ones in a text model); they are no part of the vocabulary here.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        add_bos: bool,
        num_embeddings: int | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        bos = special_tokens.get("bos_token")
        self._bos_id = backend.token_to_id(bos) if add_bos and bos else None
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        end = max(vocab.values(), default=-1) + 1
        self.vocab_size = end if num_embeddings is None else min(end, num_embeddings)
        """All ids that ``encode`` gives lie below, and no other may come to the model."""
        if self._bos_id is not None and self._bos_id >= self.vocab_size:
            raise ModelError(
                f"the tokenizer begins texts with {bos!r} (id {self._bos_id}), and the model has"
                f" {num_embeddings} embeddings: they do not belong together; get both again"
            )
        self.max_token_characters = 4 * max(map(len, vocab), default=1)
        """No token stands for more characters of text (4: a normalizer may join characters)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises RequestError for text that is no valid Unicode, or that
        holds a token for which the model has no embedding."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise RequestError(
                "the text holds a lone surrogate or is otherwise no valid Unicode; send valid UTF-8"
            ) from error
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        self._check_embedded(ids)
        return ids

    def _check_embedded(self, ids: Sequence[int]) -> None:
        if (highest := max(ids, default=0)) >= self.vocab_size:
            raise RequestError(
                f"the text holds the token {self._backend.id_to_token(highest)!r} (id {highest}),"
                f" for which this model has no embedding (it has {self.vocab_size}): leave it out"
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids outside the vocabulary give nothing."""
        ids = [token_id for token_id in token_ids if 0 <= token_id < MAX_TOKEN_IDS]
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def written(self, token_id: int) -> str | None:
        """One token as it stands in the vocabulary; None for an id outside of it."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def token_id(self, token: str) -> int | None:
        """The id of a token written as it stands in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found


class IncrementalDetokenizer:
    """Turns a growing run of token ids into text pieces that never show a broken character.

        ids    | shown: its text is given out | pending: since the text was last whole |
        text   | ..................... given ...........| held back: replacement signs  |

    1. The pieces so far are the text of all ids but for replacement signs at its end. (Only the
       bytes of a SentencePiece vocabulary break this, where they are no valid UTF-8: one wrong byte
       turns its whole run into replacement signs, what was shown before included.)
    2. Only the newest ids are kept: ``shown`` is there because a token's text can depend on the one
       before it (a leading space, bytes of one character).
    3. A token that adds no text (a skipped special token) is forgotten.

    Text that ends in replacement signs may be the start of a character. One has at most four bytes,
    so after four tokens without whole text all signs but the last are real.
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_shown = 0
        self._text = ""
        self._num_given = 0
        self._num_broken = 0

    def push(self, token_id: int) -> str:
        """The new text after one more token; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._text and self._may_forget(token_id, text):
            self._ids.pop()
            return ""
        self._num_broken = self._num_broken + 1 if text.endswith(REPLACEMENT) else 0
        self._text = text
        end = self._end_of_whole_text(text)
        piece = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        if end == len(text) and text:
            self._forget_shown()
        return piece

    def _end_of_whole_text(self, text: str) -> int:
        """How many characters can no longer change."""
        if self._num_broken > MAX_BROKEN_TOKENS:
            return len(text)
        whole = len(text.rstrip(REPLACEMENT))
        if self._num_broken < MAX_BYTES_OF_A_CHARACTER:
            return whole
        return max(whole, len(text) - 1)

    def _may_forget(self, token_id: int, text: str) -> bool:
        """Whether a token that changed nothing will never matter."""
        if text.endswith(REPLACEMENT):  # a further byte of a character changes nothing either
            return not self._decode([token_id])
        # at the very start it can be a space, which is stripped only there
        return bool(text) or len(self._ids) > MAX_BROKEN_TOKENS

    def _forget_shown(self) -> None:
        """All text is given out: from now on only what was pending is needed."""
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._text = self._decode(self._ids)
        self._num_given = len(self._text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)


# ---------------------------------------------------------------- where tokenizers come from


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("a tokenizer", "engine") from error
    return tokenizers


def from_folder(
    folder: Path, config: Mapping[str, Any], num_embeddings: int | None = None
) -> Tokenizer:
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
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return Tokenizer(
        backend,
        special_tokens={n: _token_text(config[n]) for n in names if config.get(n)},
        chat_template=_folder_template(folder, config),
        add_bos=bool(config.get("add_bos_token", False)),
        num_embeddings=num_embeddings,
    )


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja``, else the config's text, or the one named default of its list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}; get it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"the chat_template of {folder / 'tokenizer_config.json'} is no text: mend it, or put"
            " one into the folder as chat_template.jinja"
        )
    return template


def _token_text(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, Mapping) else value)
