"""Each format is known by its first row and read; ids keep their meaning when blocks change."""

import gzip
import json
import lzma
from array import array
from pathlib import Path

import pytest

from pagemill._native import chain_hash
from pagemill.bench.trace_formats.request import ReadOptions
from pagemill.bench.traces import block_view, coarsen, load_trace, refine
from pagemill.bench.waste import shared_tokens, waste_by_size
from pagemill.core.errors import ConfigError


def write(path: Path, *rows: object) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def mooncake(time_ms: int, length: int, *ids: int) -> dict[str, object]:
    return {"timestamp": time_ms, "input_length": length, "output_length": 5, "hash_ids": ids}


def test_mooncake(tmp_path: Path) -> None:
    rows = (mooncake(3000, 700, 8, 9), mooncake(0, 512, 8), mooncake(3000, 100, 7))
    trace = load_trace(write(tmp_path / "a.jsonl.gz", *rows))
    assert trace.block_tokens == 512 and not trace.is_exact and trace.name == "a"
    assert trace.times_ns.tolist() == [0, 3 * 10**9, 3 * 10**9]
    assert [trace.ids(i).tolist() for i in range(3)] == [[1], [1, 2], [0]]  # equal times: in order
    assert trace.prompt_tokens.tolist() == [512, 700, 100]


def test_qwen_is_told_from_mooncake_by_its_chat_ids(tmp_path: Path) -> None:
    row = {**mooncake(4, 20, 1, 2), "chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
    trace = load_trace(write(tmp_path / "q.jsonl", row))
    assert trace.block_tokens == 16 and trace.times_ns.tolist() == [4 * 10**9]


def test_claude_code_sessions_share_tools_and_system_prompt(tmp_path: Path) -> None:
    def request(t: float, stop: str | None, *runs: int) -> dict[str, object]:
        return {"t": t, "m": "model", "in": 400, "out": 1, "h": runs, "stop": stop}

    def session(name: str, *requests: object) -> dict[str, object]:
        return {"id": name, "block": 64, "tool": 100, "sys": 60, "requests": requests}

    sub = {"sub": 1, "t": 5.0, "tool": 0, "sys": 64, "requests": [request(6.0, None, 1, 2, 40, 1)]}
    path = write(
        tmp_path / "c.jsonl.xz",
        session("a", request(0.0, "tool_use", 1, 4), sub),
        session("b", request(1.0, "end_turn", 1, 2, 9, 2)),
    )
    trace = load_trace(path)
    a, b, nested = (trace.ids(i).tolist() for i in range(3))
    assert a[:2] == b[:2] and not set(a[2:]) & set(b[2:])  # 160 tokens: two whole blocks
    assert len(nested) == 3 and not set(nested) & {*a, *b}  # its prefix is another
    assert trace.has_tool_calls.tolist() == [1, 0, 0] and trace.block_tokens == 64


def test_text_logs_are_tokenised_and_token_ids_taken_as_they_are(tmp_path: Path) -> None:
    texts = write(tmp_path / "t.jsonl", {"t": 0.5, "input": "ab", "output": "xyz"})
    trace = load_trace(texts)
    assert trace.is_exact and trace.ids(0).tolist() == [97, 98] and trace.block_tokens == 16
    assert trace.output_tokens.tolist() == [3]
    options = ReadOptions(tokenize=lambda text: [5] * 2 * len(text))
    doubled = load_trace(texts, block_size=32, options=options)
    assert doubled.ids(0).tolist() == [5] * 4 and doubled.block_tokens == 32
    ids = load_trace(write(tmp_path / "i.jsonl", {"token_ids": [3, 1]}, {"token_ids": [3]}))
    assert ids.ids(0).tolist() == [3, 1] and ids.times_ns.tolist() == [0, 10**9]


def test_azure_has_lengths_alone(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = load_trace(path)
    assert not len(trace.token_ids) and trace.prompt_tokens.tolist() == [4808, 3180]
    assert abs(trace.times_ns[1] - trace.times_ns[0] - 52_000_000) < 1000


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no known trace"):
        load_trace(write(tmp_path / "x.jsonl", {"question": 1}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "missing.jsonl")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "bad.jsonl.gz")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(write(tmp_path / "half.jsonl", mooncake(0, 5, 1), {"timestamp": 1}))


@pytest.mark.parametrize("runs", [[0, 10**15], [0, 1, 2], ["a", 1], [2**70, 1], [[], 1]])
def test_a_session_of_no_form_is_named_by_its_line(tmp_path: Path, runs: list[object]) -> None:
    request = {"t": 0.0, "m": "m", "in": 4, "out": 1, "h": runs}
    session = {"id": "a", "block": 64, "tool": 0, "sys": 0, "requests": [request]}
    path = write(tmp_path / "c.jsonl", {**session, "requests": []}, session)
    with pytest.raises(ConfigError, match="jsonl:2: the request cannot be read: "):
        load_trace(path)


def test_smaller_and_larger_blocks(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "a.jsonl", mooncake(0, 700, 8, 9), mooncake(1, 1000, 8, 4)))
    fine = refine(trace, 16)
    assert len(fine.ids(0)) == 44 and len(fine.ids(1)) == 63  # rounded up
    assert (fine.ids(0)[:32] == fine.ids(1)[:32]).all()
    assert not set(fine.ids(0)[32:].tolist()) & set(fine.ids(1)[32:].tolist())
    coarse = coarsen(fine, 64)
    assert len(coarse.ids(0)) == 11 and (coarse.ids(0)[:8] == coarse.ids(1)[:8]).all()
    with pytest.raises(ConfigError, match="no whole number"):
        coarsen(trace, 700)


def test_tokens_as_blocks(tmp_path: Path) -> None:
    prompts = [[*range(32), 7], [*range(32)], [*range(16), *range(99, 130)]]
    path = write(tmp_path / "p.jsonl", *({"token_ids": prompt} for prompt in prompts))
    blocks = block_view(load_trace(path))
    assert [blocks.ids(i).tolist() for i in range(3)] == [[0, 1], [0, 1], [0, 2]]
    assert len(chain_hash(bytes(32), array("I", prompts[0]), 16)) == 64


def test_waste_is_counted_to_the_token(tmp_path: Path) -> None:
    prompts = [[*range(100)], [*range(50), 7, 8], [*range(40)], [9, *range(20)]]
    trace = load_trace(write(tmp_path / "p.jsonl", *({"token_ids": p} for p in prompts)))
    assert shared_tokens(trace).tolist() == [0, 50, 39, 0]  # never the last token
    waste = waste_by_size(trace)
    assert waste[16] == (2 + 7) / 4 and waste[64] == (50 + 39) / 4
