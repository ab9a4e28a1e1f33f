"""Contexts: seeded, as long as asked, and every answer stands where its depth says."""

import lzma
from itertools import pairwise
from pathlib import Path

import pytest

from model.checkpoints import tiny_tokenizer
from pagemill.bench.quality.draft import Context, make_context
from pagemill.bench.quality.tasks import KINDS, TASKS
from pagemill.bench.quality.texts import Texts, load_texts
from pagemill.core.errors import ConfigError
from pagemill.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def texts() -> Texts:
    return load_texts()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer(), special_tokens={"bos_token": "<|endoftext|>"}, chat_template=None,
        add_bos=True,
    )  # fmt: skip


def make(
    kind: str, texts: Texts, tokenizer: Tokenizer, length: int = 1500, index: int = 0, seed: int = 3
) -> Context:
    return make_context(
        kind, KINDS[kind], texts, tokenizer.encode, length=length, index=index, seed=seed
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1024, 3000])
def test_a_context_fits_its_length_and_fills_it(
    kind: str, length: int, texts: Texts, tokenizer: Tokenizer
) -> None:
    context = make(kind, texts, tokenizer, length)
    assert 0.7 * length < context.longest <= length
    assert context.token_ids[0] == tokenizer.token_id("<|endoftext|>")
    assert all(q.prompt_ids and q.answer_ids for turn in context.turns for q in turn)


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_stands_in_the_context_at_its_depth(
    kind: str, texts: Texts, tokenizer: Tokenizer
) -> None:
    context = make(kind, texts, tokenizer)
    text = tokenizer.decode(context.token_ids)
    for question in (q for turn in context.turns for q in turn):
        answer = tokenizer.decode(question.answer_ids).strip(" \n")
        if question.task in ("text", "copy", "tracking"):
            continue
        found = text.find(answer) / len(text)
        assert found >= 0 and abs(found - question.depth) < 0.12, (question.task, answer)


def test_copies_and_continuations_are_tokens_of_the_text(
    texts: Texts, tokenizer: Tokenizer
) -> None:
    context = make("prose", texts, tokenizer, 3000)
    ids, copies = list(context.token_ids), 0
    for question in context.turns[0]:
        if question.task == "copy":
            passage = [*question.prompt_ids[-16:], *question.answer_ids]
            at = round(question.depth * len(ids))
            assert ids[at : at + len(passage)] == passage
            copies += 1
    tail = context.turns[0][-1]
    assert copies == 2 and tail.task == "text" and len(tail.answer_ids) == 128
    joined = " ".join(texts.unseen)
    assert tokenizer.decode(tail.token_ids).split("\n")[0][:60] in joined


def test_variables_come_in_the_order_in_which_they_were_assigned(
    texts: Texts, tokenizer: Tokenizer
) -> None:
    context = make("lists", texts, tokenizer)
    text = tokenizer.decode(context.token_ids)
    (first, *_) = [q for q in context.turns[0] if q.task == "tracking"]
    value = tokenizer.decode(first.prompt_ids).split("value ")[1].split(",")[0]
    names = tokenizer.decode(first.answer_ids).replace("VAR ", "").strip().split(", ")
    assert f"VAR {names[0]} = {value}" in text and len(names) == 4
    for before, after in pairwise(names):
        assert f"VAR {after} = VAR {before}\n" in text


def test_turns_ask_again_what_was_answered(texts: Texts, tokenizer: Tokenizer) -> None:
    context = make("prose", texts, tokenizer)
    assert len(context.turns) == 3
    (one, two), (three, four) = context.turns[1:]
    assert two.answer_ids == context.turns[0][0].answer_ids == three.answer_ids
    assert one.answer_ids == four.answer_ids != two.answer_ids


def test_seeds(texts: Texts, tokenizer: Tokenizer) -> None:
    for kind in KINDS:
        one = make(kind, texts, tokenizer)
        assert one == make(kind, texts, tokenizer)
        assert one.token_ids != make(kind, texts, tokenizer, seed=4).token_ids
        assert one.token_ids != make(kind, texts, tokenizer, index=1).token_ids


def test_all_tasks_are_asked_and_spread(texts: Texts, tokenizer: Tokenizer) -> None:
    asked = [q for kind in KINDS for turn in make(kind, texts, tokenizer, 3000).turns for q in turn]
    assert {q.task for q in asked} == set(TASKS)
    for task in ("retrieval", "needles"):
        depths = [q.depth for q in asked if q.task == task]
        assert min(depths) < 0.2 and max(depths) > 0.75


def test_texts_of_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    monkeypatch.setenv("PAGEMILL_DATA", str(tmp_path))
    assert load_texts().source == "own"
    path = tmp_path / "text" / "docs2026_mooncake.txt.xz"
    path.write_bytes(lzma.compress(b"a paragraph long enough to be one\nover two lines\n\nshort"))
    found = load_texts()
    assert found.unseen == ("a paragraph long enough to be one over two lines",)
    assert found.source == "docs2026_mooncake.txt.xz"
    path.write_bytes(b"no xz")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_texts()
