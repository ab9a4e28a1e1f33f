"""The benchmarks in a clone: without their data they say in one line what to bring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "file"),
    [
        ("agents.py", "traces/agent_text_miniswe.jsonl.xz"),
        ("policies.py", "traces/mooncake_conversation.jsonl.gz"),
        ("perplexity.py", "text/docs2026_mooncake.txt.xz"),
    ],
)
def test_missing_data_is_one_line(tmp_path: Path, script: str, file: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick"],
        env={**os.environ, "PAGEMILL_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(str(tmp_path / file))
    for words in ("docs/benchmarks.md", "set PAGEMILL_DATA to the folder that has " + file):
        assert words in done.stderr
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"`{file}`" in page


def test_without_a_gpu_its_benchmark_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_attention.py"), "--quick"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("this benchmark measures a GPU")
    assert "RESULT" not in done.stdout
