"""``pagemill replay`` from the outside."""

import json
from pathlib import Path

import pytest

from pagemill.cli.main import main

CUT = Path(__file__).parents[1] / "data" / "mooncake_conversation_1000.jsonl.gz"


def test_a_table_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--eviction",
        "lru,reuse_rank",
        "--num-blocks",
        "5%,2000",
        "--prefix-index",
        "flat,off",
    ]
    files = ["--json", str(tmp_path / "r.json"), "--picture", str(tmp_path / "r.svg")]
    assert main(["replay", str(CUT), *flags, *files]) == 0
    shown = capsys.readouterr().out
    assert "reuse_rank" in shown and "first 10 %" in shown
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["rows"]) == 5 and found["num_requests"] == 1000
    assert all(0 <= row["hit_rate"] <= row["bound"] <= 1 for row in found["rows"])
    assert (tmp_path / "r.svg").is_file()


def test_a_piped_table_is_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["replay", str(CUT), "--num-blocks", "5%,20%", "--eviction", "lru"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and "evic" in shown
    assert len({len(line) for line in shown.splitlines() if line.startswith(("│", "┏"))}) == 1


def test_smaller_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--eviction", "lru", "--num-blocks", "5%", "--block-size", "128", "--no-bound"]
    assert main(["replay", str(CUT), *flags]) == 0
    assert "128 tokens" in capsys.readouterr().out


def test_allocators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    flags = ["--allocator", "contiguous,paged", "--json", str(out)]
    assert main(["replay", str(CUT), *flags]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["allocator"] for row in rows] == ["contiguous", "paged"]
    assert rows[1]["waste"] < 0.04 < rows[0]["waste"]
    assert "paged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    (
        (["--eviction", "best"], "choose from lru"),
        (["--num-blocks", "many"], "write 2%"),
        (["--num-blocks", "inf%"], "write 2%"),
        (["--num-blocks", "nan%"], "write 2%"),
        (["--block-size", "0"], "--block-size 0"),
        (["--block-size", "-1"], "--block-size -1"),
        (["--block-size", "-1", "--allocator", "paged"], "--block-size -1"),
        (["--block-size", "9" * 30, "--allocator", "paged"], "--block-size 999"),
        (["--json", "/no/folder/x.json"], "there is no folder /no/folder"),
        (["--picture", "/no/folder/x.svg"], "there is no folder /no/folder"),
        (["--json", "/", "--allocator", "paged"], "/ cannot be written"),
        (["--spread-hours", "nan"], "--spread-hours nan"),
        (["--prefix-index", "tree"], "radix"),
        (["--allocator", "heap"], "contiguous"),
        (["--block-size", "100"], "no whole number"),
    ),
)
def test_wrong_flags_say_what_is_right(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(CUT), *flags]) == 1
    assert words in capsys.readouterr().err


def row(**changed: object) -> dict[str, object]:
    whole = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}
    return {**whole, **changed}


@pytest.mark.parametrize(
    ("wrong", "words"),
    (
        (row(hash_ids=[2**64]), "the ids are no list of whole numbers"),
        (row(hash_ids=["a"]), "the ids are no list of whole numbers"),
        (row(hash_ids=[[1], [2, 3]]), ""),
        (row(hash_ids=None), "the ids are no list of whole numbers"),
        (row(timestamp=float("nan")), "the time nan"),
        (row(timestamp=float("inf")), "the time inf"),
        (row(timestamp=-5), "the time -0.005"),
        (row(timestamp="soon"), ""),
        (row(timestamp=1e300), "the time 1e+297"),
        (row(input_length=-5), "the prompt length -5"),
        (row(input_length=float("inf")), "the prompt length inf"),
        (row(output_length=None), "the output length None"),
        ({"timestamp": 3}, "there is no 'hash_ids'"),
        ([1], "this is list"),
    ),
)
def test_a_wrong_request_is_named_by_its_line(
    tmp_path: Path, wrong: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in (row(), row(), wrong)))
    assert main(["replay", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"{path}:3: the request cannot be read: {words}" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    (
        ({"token_ids": [-1, 2]}, "token ids go from 0"),
        ({"token_ids": [2**32]}, "token ids go from 0"),
        ({"token_ids": "abc"}, "the ids are no list of whole numbers"),
        ({"prompt": 7}, "no prompt: give one of"),
        ({"other": 7}, "no prompt: give one of"),
        ({"prompt": "x", "t": None}, "float()"),
    ),
)
def test_a_wrong_prompt_is_named_by_its_line(
    tmp_path: Path, wrong: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in ({"prompt": "x"}, wrong)))
    assert main(["replay", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"{path}:2: the request cannot be read: {words}" in err and err.count("\n") == 1


def test_prompts_shorter_than_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2, 3]}) + "\n")
    assert main(["replay", str(path)]) == 1
    assert "smaller --block-size" in capsys.readouterr().err
    assert main(["replay", str(path), "--block-size", "2", "--num-blocks", "5"]) == 0


def test_requests_of_no_tokens_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [row(), row(input_length=0, hash_ids=[]), row(), row(hash_ids=[2**64 - 1])]
    path.write_text("\n".join(json.dumps(one) for one in rows))
    out = tmp_path / "rows.json"
    flags = ["--num-blocks", "5", "--eviction", "lru", "--json", str(out)]
    assert main(["replay", str(path), *flags]) == 0
    assert "Left out: 1 request(s) of no tokens" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["num_requests"], found["num_empty"]) == (3, 1)
    path.write_text(json.dumps(rows[1]) + "\n")
    assert main(["replay", str(path)]) == 1
    assert "no request of a token" in capsys.readouterr().err


def test_a_trace_of_lengths_has_nothing_to_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    )
    assert main(["replay", str(path), "--block-size", "16"]) == 1
    assert "--allocator" in capsys.readouterr().err
