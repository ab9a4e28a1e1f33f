"""Logs in their forms, and what is wrong with wrong ones."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from pagemill.bench.explain_read import PIECE_CHARACTERS, Broken, LoggedRequest, read_log
from pagemill.bench.explain_tokens import PlainTokenizer, load_prompts
from pagemill.core.errors import ConfigError, ModelError

MESSAGES = [{"role": "user", "content": "Hi"}]


def read(tmp_path: Path, *records: Any) -> list[LoggedRequest]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_log(path))


@pytest.mark.parametrize("wrap", [None, "body", "request", "request_body"])
def test_openai_bodies(tmp_path: Path, wrap: str | None) -> None:
    body = {"model": "m", "messages": MESSAGES, "user": "ann", "tools": [{"type": "function"}]}
    (one,) = read(tmp_path, {wrap: body, "timestamp": 5} if wrap else {**body, "timestamp": 5})
    assert one.messages == tuple(MESSAGES) and len(one.tools) == 1
    assert (one.tenant, one.time_s) == ("ann", 5.0)
    assert one.where.endswith("log.jsonl:1")


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    got = read(
        tmp_path,
        {"prompt": "text"},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1], [2]]},
        {"t": 1.5, "s": "x", "input": "in", "output": "out"},
    )
    assert [one.text for one in got] == ["text", "a", "b", "", "", "", "in"]
    assert [one.token_ids for one in got[3:6]] == [(1, 2, 3), (1,), (2,)]
    assert (got[6].time_s, got[6].session, got[6].output) == (1.5, "x", "out")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (12.5, 12.5),
        ("7", 7.0),
        (1_700_000_000_000, 1.7e9),
        ("2026-01-01T00:00:00+00:00", 1767225600),
    ],
)
def test_times(tmp_path: Path, value: Any, seconds: float) -> None:
    assert read(tmp_path, {"prompt": "x", "ts": value})[0].time_s == seconds


def test_a_key_is_shown_as_a_hash_only(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer secret", "X-Session-Id": "s7"}
    a, b = read(
        tmp_path,
        {"headers": headers, "body": {"messages": MESSAGES}},
        {"headers": {"x-api-key": "other"}, "body": {"messages": MESSAGES}},
    )
    assert a.tenant.startswith("key ") and "secret" not in repr(a) and a.tenant != b.tenant
    assert a.session == "s7"


def conversations(count: int) -> list[dict[str, Any]]:
    turns = [("human", "How? é€😀" * 40), ("gpt", "So."), ("human", "Why?")]
    said = [{"from": who, "value": value} for who, value in turns]
    return [{"id": f"c{i}", "conversations": said} for i in range(count)]


@pytest.mark.parametrize("indent", [None, 1])
def test_sharegpt_is_read_in_pieces(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "sharegpt.json"
    count = 2 * PIECE_CHARACTERS // 600
    path.write_text(json.dumps(conversations(count), indent=indent, ensure_ascii=False), "utf-8")
    assert path.stat().st_size > 2 * PIECE_CHARACTERS
    got = list(read_log(path))
    assert len(got) == 2 * count
    assert [m["role"] for m in got[1].messages] == ["user", "assistant", "user"]
    assert got[1].session == "c0" and got[-1].messages[0]["content"].endswith("😀")


def test_packed_logs(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x"}).encode() + b"\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(line * 3))
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf\n" + line * 2))
    assert len(list(read_log(tmp_path / "a.gz"))) == 3
    assert len(list(read_log(tmp_path / "a.xz"))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "holds no request"),
        (b"[]", "holds no request"),
        (b'{"prompt": "x"}\nno json\n', ":2: no JSON"),
        (b"7\n", "not a JSON object"),
        (b'{"model": "m"}\n', "no prompt"),
        (b'{"prompt": [1, "x"]}\n', "no prompt"),
        (b'{"prompt": [-1]}\n', "no prompt"),
        (b'{"messages": ["x"]}\n', "no object with a role"),
        (b'{"messages": [{"role": "user"}], "tools": [1]}\n', "a tool"),
        (b'{"messages": [{"role": "user"}], "tools": 5}\n', "the tools are no list"),
        (b'{"prompt": "x", "ts": "soon"}\n', "no time"),
        (b'{"prompt": "x", "ts": 1' + b"0" * 400 + b"}\n", "no time"),
        (b'{"prompt": "x", "ts": [1]}\n', "no time"),
        (b'[{"conversations": [7]}]', "a turn"),
        (b'[{"conversations": []}, {"conv', "record 2: no JSON"),
        (b'{"prompt": "\xff"}\n', "no JSON"),
        (b'[{"prompt": "\xff"}]\n', "cannot be read as a log"),
    ],
)
def test_wrong_logs_are_named(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words) as raised:
        list(read_log(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "num_read", "places"),
    [
        (b'{"prompt": "x"}\n{"prompt": "y"}\n{"prom', 2, [":3"]),
        (b'{"prom\n{"prompt": "y"}\n7\n{"prompt": "\xff"}\n', 1, [":1", ":3", ":4"]),
        (b'[{"prompt": "x"}, {"prompt": 7}, {"prompt": "y"}, {"pro', 2, ["record 2", "record 4"]),
        (b'{"prompt": "x"}\n' + b"no\n" * 99, 1, [":2", ":3", ":4", ":5", ":6"]),
    ],
)
def test_broken_records_are_left_out_and_counted(
    tmp_path: Path, text: bytes, num_read: int, places: list[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    broken = Broken(is_strict=False)
    assert len(list(read_log(path, broken=broken))) == num_read
    assert broken.count == (99 if len(places) == 5 else len(places))
    for place, words in zip(places, broken.first, strict=True):
        assert str(path) in words and place in words


def test_a_log_of_which_nothing_can_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"no\nno\n")
    with pytest.raises(ConfigError, match=":1: no JSON"):
        list(read_log(path, broken=Broken(is_strict=False)))


def test_a_packed_log_that_is_cut_gives_what_it_has(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"prompt": f"{i * 7919}"}).encode() + b"\n" for i in range(9999))
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(lines)[:-4000])
    broken = Broken(is_strict=False)
    assert 0 < len(list(read_log(path, broken=broken))) < 9999
    assert broken.count == 1 and "cannot be read as a log" in broken.first[0]
    with pytest.raises(ConfigError, match="cannot be read as a log"):
        list(read_log(path))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    for name in ("a.gz", "a.xz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(ConfigError, match="cannot be read as a log"):
            list(read_log(tmp_path / name))


def test_without_a_model_words_are_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path))
    prompts = load_prompts(None, None)
    assert "plain words" in prompts.note and "--model" in prompts.note
    text = "Ünder 12 mills,\n  x_1"
    coder = PlainTokenizer()
    assert coder.decode(coder.encode(text)) == text
    with pytest.raises(ModelError, match="no-such-model"):
        load_prompts("no-such-model", None)
    with pytest.raises(ConfigError, match="chat template"):
        load_prompts(None, tmp_path / "none.jinja")
