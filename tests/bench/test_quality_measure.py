"""``pagemill quality`` from the outside: a small random model, and one context of SmolLM2."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoints import random_model, save_folder
from pagemill.bench.quality.measure import Measured, QualityConfig, measure
from pagemill.bench.quality.results import results
from pagemill.cli.main import main
from pagemill.core.errors import ControlError
from pagemill.runtime.cache_run import CacheRun


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("smollm", max_position_embeddings=1600)
    return save_folder(model, tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def config(folder: Path) -> QualityConfig:
    return QualityConfig(str(folder), ("bf16",), (1100,), num_contexts=1, num_threads=1)


@pytest.fixture(scope="module")
def measured(config: QualityConfig) -> Measured:
    return measure(config)


def test_a_table_rows_and_a_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "q.json", tmp_path / "q.svg"
    flags = ["--formats", "bf16", "--lengths", "1100,1300", "--contexts", "1", "--mode", "both"]
    files = ["--json", str(out), "--picture", str(picture), "--threads", "1"]
    assert main(["quality", str(folder), *flags, *files]) == 0
    shown = capsys.readouterr().out
    assert "undecided" in shown and "damaged blocks: bf16 fail" in shown
    found = json.loads(out.read_text())
    assert found["controls"]["self_kl"] == 0 and picture.is_file()
    assert found["controls"]["poisoned"] == {"bf16": "fail"}
    keys = ("format", "task", "length", "mode", "kl", "kl_p99", "flips", "exact", "recovery")
    for row in found["rows"]:
        assert set(row) >= {*keys, "ppl", "verdict", "context_bytes"}
        assert row["context_bytes"] > 0
    totals = [row for row in found["rows"] if row["task"] == "all"]
    assert [row["mode"] for row in totals] == ["cascade", "store"]
    assert len(found["rows"]) == 2 + 2 * 2 * 9
    assert all(0 <= row["kl"] < 0.01 for row in found["rows"])
    assert {row["length"] for row in found["depths"]} == {1100, 1300}


def test_a_model_that_knows_nothing_decides_nothing(
    config: QualityConfig, measured: Measured
) -> None:
    (total,) = results(config, measured).totals
    assert total.verdict.word == "undecided" and total.found.reference_accuracy < 0.8


def test_later_turns_reuse_the_answers_before(config: QualityConfig, measured: Measured) -> None:
    """Bytes of the context say it: each turn's is longer by the question adopted before."""
    scores = measured.scores["bf16", "cascade"]
    first = next(s for s in scores if s.task == "retrieval")
    turns = [s for s in scores if s.task == "turns"]
    assert first.context_bytes < turns[0].context_bytes == turns[1].context_bytes
    assert turns[1].context_bytes < turns[2].context_bytes == turns[3].context_bytes


def test_a_wrong_count_of_bytes_ends_the_run(config: QualityConfig, measured: Measured) -> None:
    scores = measured.scores["bf16", "cascade"]
    wrong = [replace(scores[0], context_bytes=scores[0].context_bytes - 1), *scores[1:]]
    with pytest.raises(ControlError, match="context x format bytes"):
        results(config, replace(measured, scores={("bf16", "cascade"): wrong}))


def test_damage_that_is_not_noticed_ends_the_run(config: QualityConfig, measured: Measured) -> None:
    with pytest.raises(ControlError, match="not noticed"):
        results(config, replace(measured, poisoned={"bf16": measured.scores["bf16", "cascade"]}))


def test_a_reference_that_changes_ends_the_run(config: QualityConfig, measured: Measured) -> None:
    others = measured.scores["bf16", "cascade"]
    with pytest.raises(ControlError, match="against itself"):
        results(config, replace(measured, self_scores=others))


def test_a_run_whose_damage_does_nothing_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CacheRun, "poison", lambda run: None)
    flags = ["--formats", "bf16", "--lengths", "1100", "--contexts", "1", "--kinds", "records"]
    assert main(["quality", str(folder), *flags, "--threads", "1"]) == 1
    assert "was not noticed" in capsys.readouterr().err


def test_damage_in_the_real_path_fails_the_format(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format that is broken gets *fail* and exit code 1 though the sample is small."""
    prefill = CacheRun.prefill

    def broken(run: CacheRun, token_ids: list[int], chunk_tokens: int) -> None:
        prefill(run, token_ids, chunk_tokens)
        if run.kv_format != "fp32":
            run.poison()

    monkeypatch.setattr(CacheRun, "prefill", broken)
    flags = ["--formats", "bf16", "--lengths", "1100", "--contexts", "1", "--kinds", "records"]
    assert main(["quality", str(folder), *flags, "--threads", "1"]) == 1
    shown = capsys.readouterr()
    assert "bf16 cascade: fail, kl up to" in shown.out and not shown.err


@pytest.mark.parametrize(
    ("flags", "words"),
    (
        (["--formats", "q4"], "choose from fp32, bf16"),
        (["--formats", ","], "name a KV format"),
        (["--lengths", "2k"], "was made for 1600 positions"),
        (["--lengths", "many"], "write tokens, as 2048 or 2k"),
        (["--lengths", ""], "write tokens, as 2048 or 2k"),
        (["--lengths", "64"], "512 tokens at least"),
        (["--contexts", "0"], "--contexts 0"),
        (["--chunk", "0"], "--chunk 0"),
        (["--threads", "0"], "--threads 0"),
        (["--kinds", "poems"], "choose from prose"),
        (["--json", "/no/folder/x.json"], "there is no folder /no/folder"),
        (["--picture", "x.gif"], "must end in .svg"),
    ),
)
def test_bad_flags(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(folder), *flags]) == 1
    assert words in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "no-such-model"]) == 1
    assert "there is no model at 'no-such-model'" in capsys.readouterr().err


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    """The real model finds records through bf16 KV as through fp32 KV."""
    config = QualityConfig(
        str(smollm2), ("bf16",), (512,), kinds=("records",), num_contexts=1, num_threads=1
    )
    found = results(config, measure(config))
    (total,) = found.totals
    assert total.found.reference_accuracy > 0.9 and 0 < total.found.kl.high < 0.003
    assert total.verdict.word == "undecided" and found.poisoned["bf16"].word == "fail"
