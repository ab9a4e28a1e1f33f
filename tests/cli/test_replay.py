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


def test_a_trace_of_lengths_has_nothing_to_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    )
    assert main(["replay", str(path)]) == 1
    assert "--allocator" in capsys.readouterr().err
