"""The command: table, JSON, exit codes, one line for an error."""

import json
from pathlib import Path

import pytest

from pagemill.cli.main import main

STABLE = " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(400))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sessions behind a clock. No model is here, so words are tokens."""
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path))
    path = tmp_path / "log.jsonl"
    lines = [{"t": 20 * i, "prompt": f"[bold] now {i}{i}:0{i}\n{STABLE}", "s": i} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_findings_are_told(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert "plain words as tokens" in out
    assert "a date or time that changes at token 6" in out
    assert "tokens a minute" in out and "behind the stable part" in out
    assert "[bold]" in out, "text of a prompt is no markup"
    assert f"{log}:2, compared with {log}:1" in out


def test_a_piped_table_is_whole(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    log.write_text(log.read_text() * 250)
    assert main(["explain", str(log)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 2 and "1,000" in rows[0] and "…" not in "".join(rows)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--fail-under", "0.5"), 3, "is under 50.0%"),
        (("--fail-under", "0%"), 0, ""),
        (("--max-lost-tokens", "100"), 3, "more than 100"),
        (("--max-lost-tokens", "1000000"), 0, ""),
    ],
)
def test_limits_set_the_exit_code(
    log: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, words: str
) -> None:
    assert main(["explain", str(log), *flags]) == code
    assert words in capsys.readouterr().out


def test_the_whole_report_as_json(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    assert main(["explain", str(log), "--by", "session", "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    assert [group["num_requests"] for group in report["groups"]] == [1, 1, 1, 1]
    assert report["minutes"] == 1.0
    assert report["total"]["lost_tokens"] == sum(g["lost_tokens"] for g in report["groups"]) > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("none.jsonl",), "there is no log none.jsonl"),
        (("LOG", "--cache-tokens", "3"), "--cache-tokens is 3"),
        (("LOG", "--json", "/no/such/folder/x"), "cannot be written"),
        (("LOG", "--model", "nobody"), "no model at 'nobody'"),
    ],
)
def test_errors_are_one_line(
    log: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert main(["explain", *(str(log) if flag == "LOG" else flag for flag in flags)]) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_rate_that_is_none_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("60", "x", "nan"):
        with pytest.raises(SystemExit):
            main(["explain", str(log), "--fail-under", rate])
    assert "no rate" in capsys.readouterr().err


def test_a_log_cut_in_its_last_line_is_explained(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(log.read_text()[:-500])
    target = tmp_path / "report.json"
    assert main(["explain", str(log), "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "a date or time that changes" in out
    assert "1 record was left out as unreadable" in out and f"{log}:4: no JSON" in out
    report = json.loads(target.read_text())
    assert report["num_broken"] == 1 and f"{log}:4" in report["broken"][0]
    assert main(["explain", str(log), "--strict"]) == 1
    assert f"{log}:4: no JSON" in capsys.readouterr().err


def test_messages_that_a_template_refuses_are_left_out(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    bodies = [{"messages": [{"role": role, "content": "Hi"}]} for role in ("tool", "user")]
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    flags = [str(log), "--chat-template", str(template)]
    assert main(["explain", *flags]) == 0
    assert f"{log}:1: " in capsys.readouterr().out
    log.write_text(json.dumps(bodies[0]) + "\n")
    assert main(["explain", *flags]) == 1
    assert "no tools" in capsys.readouterr().err
