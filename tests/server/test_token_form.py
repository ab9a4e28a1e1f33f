"""Tokens that are a part of a character, as answers show them."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pagemill.core.step import TokenLogprobs
from pagemill.models.tokenizer import Tokenizer
from pagemill.server.answers import Answers
from pagemill.server.token_form import TokenForms, num_characters

DASH = "\u2014".encode()  # e2 80 94
BYTE_LEVEL = ["a", "Ġmill", "âĢ", "Ķ", "âĢĶ", "ï¿½", "Ã", "Ä"]
SENTENCE_PIECE = ["a", "▁mill", "<0xE2>", "<0x80>", "<0x94>", "<0x61>", "\ufffd", "é"]


def tokenizer(words: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    backend = Backend(models.WordLevel(vocab, unk_token="a"))
    if words is BYTE_LEVEL:
        backend.decoder = decoders.ByteLevel()
    else:
        replace = decoders.Replace("▁", " ")
        backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, special_tokens={}, chat_template=None, add_bos=False)


@pytest.mark.parametrize(
    ("words", "token_id", "text", "data"),
    [
        (BYTE_LEVEL, 0, "a", b"a"),
        (BYTE_LEVEL, 1, " mill", b" mill"),
        (BYTE_LEVEL, 2, r"bytes:\xe2\x80", DASH[:2]),
        (BYTE_LEVEL, 3, r"bytes:\x94", DASH[2:]),
        (BYTE_LEVEL, 4, "\u2014", DASH),
        (BYTE_LEVEL, 5, "\ufffd", "\ufffd".encode()),
        (SENTENCE_PIECE, 1, " mill", b" mill"),
        (SENTENCE_PIECE, 2, r"bytes:\xe2", DASH[:1]),
        (SENTENCE_PIECE, 5, "a", b"a"),
        (SENTENCE_PIECE, 6, "\ufffd", "\ufffd".encode()),
        (SENTENCE_PIECE, 7, "é", "é".encode()),
    ],
)
def test_the_bytes_are_the_tokens_own(
    words: list[str], token_id: int, text: str, data: bytes
) -> None:
    assert TokenForms(tokenizer(words)).both(token_id) == (text, data)


@pytest.mark.parametrize("words", [BYTE_LEVEL, SENTENCE_PIECE])
def test_chat_gives_real_bytes(words: list[str]) -> None:
    """The bytes of all tokens are the bytes of the text."""
    ids = [2, 3] if words is BYTE_LEVEL else [2, 3, 4]
    entries = [TokenLogprobs(i, -1.0, 1, ((i, -1.0), (6, -2.0))) for i in ids]
    choice = Answers("chat", "m", tokenizer(words)).chat_delta({}, entries)
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content) == DASH
    assert all(len(one["top_logprobs"]) == 2 for one in content)


@pytest.mark.parametrize("words", [BYTE_LEVEL, SENTENCE_PIECE])
@pytest.mark.parametrize("chosen", [2, 5, 7])
def test_five_best_stay_five_and_the_chosen_one_is_there(words: list[str], chosen: int) -> None:
    top = tuple((token_id, -1.0 - i) for i, token_id in enumerate((0, 2, 3, 5, 6)))
    entry = TokenLogprobs(chosen, dict(top).get(chosen, -9.0), 1, top)
    answers = Answers("text", "m", tokenizer(words))
    value, end = answers.text_logprobs([entry, entry], first_token_id=0)
    best = value["top_logprobs"][1]
    assert len(best) == (5 if chosen in dict(top) else 6)
    assert best[value["tokens"][1]] == value["token_logprobs"][1] == entry.logprob
    assert sorted(best.values(), reverse=True)[:5] == [score for _, score in top]
    assert value["text_offset"][0] == 0 and end >= value["text_offset"][-1]


def test_offsets_count_characters_of_the_text() -> None:
    entries = [TokenLogprobs(i, -1.0, 1, ()) for i in (2, 3, 0, 1)]
    value, end = Answers("text", "m", tokenizer(BYTE_LEVEL)).text_logprobs(entries, offset=10)
    assert (value["text_offset"], end) == ([10, 11, 11, 12], 17)
    assert num_characters([DASH[:2], DASH[2:]]) == 1


def test_equal_texts_are_told_apart_by_their_ids() -> None:
    entry = TokenLogprobs(5, -2.0, 2, ((0, -1.0), (5, -2.0)))
    shown, best = TokenForms(tokenizer(SENTENCE_PIECE)).alternatives(entry)
    assert (shown, best) == ("token_id:5", {"a": -1.0, "token_id:5": -2.0})
