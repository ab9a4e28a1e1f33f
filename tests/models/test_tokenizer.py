"""Tokenizers of folders and GGUF files, and text that grows token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoints import SPECIAL, tiny_tokenizer
from model.naive_sentencepiece import naive_encode, small_vocabulary
from pagemill.core.errors import ModelError, RequestError
from pagemill.models import gguf_tokenizer, tokenizer
from pagemill.models.gguf import GgufFile
from pagemill.models.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer

EMOJI = "🙂👩‍👩‍👧‍👦🇩🇪"
HARD_TEXTS = (
    EMOJI * 3,
    "你好，世界。東京" * 3,
    "e\u0301n\u0303o\u0308",
    "مرحبا بالعالم",
    " a  b   c ",
    "\ufffd x \ufffd",
    "x \ufffd",
)
texts = st.lists(
    st.one_of(
        st.sampled_from([" ", " ", "The fox", " a", "é", "你", "🙂", "\u0301", "\u200d"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
).map("".join)


class Pieces:
    """A SentencePiece vocabulary, and the tokenizer that pagemill builds from it."""

    def __init__(self, add_space_prefix: bool) -> None:
        self.metadata = small_vocabulary(add_space_prefix=add_space_prefix)
        self.tokenizer = gguf_tokenizer.from_gguf(self.metadata)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    with GgufFile(smollm2) as file:
        return gguf_tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "plain"])
def pieces(request: pytest.FixtureRequest) -> Pieces:
    return Pieces(request.param)


def folder(path: Path, **config: Any) -> Tokenizer:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return tokenizer.from_folder(path, config)


def stream(decoder: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(decoder, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids]


def assert_streams_whole(decoder: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> None:
    """The pieces are the text of all ids, at most without replacement signs at its end."""
    shown, whole = (
        "".join(stream(decoder, ids, skip=skip)),
        decoder.decode(ids, skip_special_tokens=skip),
    )
    assert whole.startswith(shown)
    assert not whole[len(shown) :].strip(REPLACEMENT)


# ---------------------------------------------------------------- text as it grows


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_no_piece_shows_a_broken_character(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text)
    assert len(ids) > 2
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(stream(smol, ids))
        assert "".join(stream(smol, ids)) == text
    assert_streams_whole(smol, ids)


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_pieces_join_to_the_text(smol: Tokenizer, text: str) -> None:
    """To the text that all tokens decode to: SmolLM2 has no token for a few bytes."""
    ids = smol.encode(text)
    shown = "".join(stream(smol, ids))
    assert shown.rstrip(REPLACEMENT) == smol.decode(ids).rstrip(REPLACEMENT)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=40), skip=st.booleans())
def test_any_ids_join_to_their_text(smol: Tokenizer, ids: list[int], skip: bool) -> None:
    """Ids of no text at all: the low ones are single bytes and special tokens."""
    assert_streams_whole(smol, ids, skip=skip)


@settings(max_examples=150, deadline=None)
@given(text=texts, specials=st.lists(st.integers(0, 12), max_size=4))
def test_sentence_pieces_join_to_the_text(pieces: Pieces, text: str, specials: list[int]) -> None:
    """Wherever skipped special tokens stand, no space is lost and no character broken."""
    decoder = pieces.tokenizer
    ids = decoder.encode(text)
    for at in specials:
        ids.insert(at, 2)
    shown = "".join(stream(decoder, ids))
    assert shown.rstrip(REPLACEMENT) == decoder.decode(ids).rstrip(REPLACEMENT)
    assert REPLACEMENT not in shown or REPLACEMENT in text


def test_special_tokens_are_skipped_or_shown(smol: Tokenizer) -> None:
    ids = smol.encode("<|im_start|>user\nHi<|im_end|>")
    assert "".join(stream(smol, ids)) == "user\nHi"
    assert "".join(stream(smol, ids, skip=False)) == "<|im_start|>user\nHi<|im_end|>"


def test_a_cut_off_character_is_not_shown(smol: Tokenizer) -> None:
    ids = smol.encode("ok 𓀀")
    assert "".join(stream(smol, ids[:-1])).rstrip() == "ok"


def test_endless_broken_bytes_come_out_bounded(smol: Tokenizer) -> None:
    """Bytes that never make a character are shown as replacement signs, and little is kept."""
    (byte,) = [i for i in range(400) if smol.token_id("Ģ") == i]
    detokenizer = IncrementalDetokenizer(smol)
    shown = "".join(detokenizer.push(byte) for _ in range(500))
    assert shown == REPLACEMENT * len(shown) and len(shown) >= 499
    assert len(detokenizer._ids) < 200


def test_a_long_run_of_special_tokens_keeps_little(pieces: Pieces) -> None:
    decoder = pieces.tokenizer
    detokenizer = IncrementalDetokenizer(decoder)
    assert not any(detokenizer.push(2) for _ in range(500))
    assert len(detokenizer._ids) < 200
    assert "".join(detokenizer.push(i) for i in decoder.encode("The fox")).strip() == "The fox"


# ---------------------------------------------------------------- encoding


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("The quickbrownfxjmps,.0é你🙂 \n"), max_size=40))
def test_sentence_pieces_equal_the_naive_twin(pieces: Pieces, text: str) -> None:
    built = pieces.tokenizer
    assert built.encode(text) == naive_encode(pieces.metadata, text)
    assert built.decode(built.encode(text)) == text


def test_bos_is_added_once(pieces: Pieces) -> None:
    built = pieces.tokenizer
    assert built.encode("fox").count(1) == 1
    assert built.encode("<s>fox").count(1) == 1
    assert built.encode("fox", add_special_tokens=False).count(1) == 0
    assert built.encode("") == [1]
    assert (
        gguf_tokenizer.from_gguf({**pieces.metadata, "tokenizer.ggml.add_bos_token": False}).encode(
            ""
        )
        == []
    )


def test_bos_of_a_folder(tmp_path: Path) -> None:
    plain = folder(tmp_path, bos_token=SPECIAL[0])
    assert plain.encode("fox")[0] != 0
    assert (
        folder(tmp_path, bos_token={"content": SPECIAL[0]}, add_bos_token=True).encode("a")[0] == 0
    )


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d"])
def test_lone_surrogates_are_a_request_error(smol: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        smol.encode(text)


def test_ids_beyond_the_vocabulary_give_no_text(smol: Tokenizer) -> None:
    a = smol.encode("a")
    assert smol.decode([-1, *a, smol.vocab_size + 5, 1 << 32, 1 << 70]) == "a"
    assert smol.token_text(smol.vocab_size) == ""
    assert smol.token_id("no such token") is None


def test_names_of_special_tokens(pieces: Pieces) -> None:
    """As chat templates call them."""
    found = gguf_tokenizer.from_gguf({**pieces.metadata, "tokenizer.ggml.padding_token_id": 2})
    assert found.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>",
    }  # fmt: skip


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "carries no tokenizer"),
        ({"model": "bert"}, "kind 'bert' is not supported"),
        ({"scores": [0.0]}, "no score for every token"),
        ({"tokens": ["a", 5]}, "damaged"),
        ({"unknown_token_id": 10**9}, "damaged"),
        ({"model": "gpt2", "pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not known"),
        ({"model": "gpt2", "merges": ["no such"]}, "damaged"),
        ({"model": "gpt2", "merges": ["single"]}, "damaged"),
    ],
)
def test_foreign_and_damaged_gguf_tokenizers_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    metadata = small_vocabulary(add_space_prefix=True)
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=words):
        gguf_tokenizer.from_gguf(metadata)


def test_a_folder_without_or_with_a_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json: save"):
        tokenizer.from_folder(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        tokenizer.from_folder(tmp_path, {})


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    assert folder(tmp_path).chat_template is None
    assert folder(tmp_path, chat_template="text").chat_template == "text"
    assert folder(tmp_path, chat_template=named).chat_template == "list"
    assert folder(tmp_path, chat_template=named[1:]).chat_template is None
    with pytest.raises(ModelError, match=r"no text.*chat_template\.jinja"):
        folder(tmp_path, chat_template={"a": 1})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert folder(tmp_path, chat_template="text").chat_template == "file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        folder(tmp_path)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "smollm", "gpt-2"])
def test_byte_level_kinds_read_back_what_they_wrote(pre: str) -> None:
    stored = json.loads(tiny_tokenizer().to_str())["model"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(stored["vocab"], key=stored["vocab"].get),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in stored["merges"]],
    }
    built = gguf_tokenizer.from_gguf(metadata)
    for text in ("I'm 1234 tokens,  \n\n of text\t", "Grüße 東京 🙂"):
        assert built.decode(built.encode(text)) == text
