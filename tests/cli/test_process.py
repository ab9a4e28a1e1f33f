"""The command as a process: help, errors of one line, a drain on SIGTERM, the doctor."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

COMMAND = (sys.executable, "-m", "pagemill.cli.main")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


@pytest.mark.parametrize("command", [(), ("serve",), ("pull",), ("doctor",)])
def test_help_can_be_read(command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "usage: pagemill" in done.stdout
    assert all(len(line) < 120 for line in done.stdout.splitlines())


def check_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith("pagemill: "), done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_wrong_models_are_refused_in_one_line(tmp_path: Path, smollm2: Path) -> None:
    check_refused(run("serve", "no-such-model", "--port", "0"), "no-such-model", "GGUF")
    empty = tmp_path / "empty"
    empty.mkdir()
    check_refused(run("serve", str(empty), "--port", "0"), "config.json")
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04" + b"x" * 1000)
    check_refused(run("serve", str(foreign), "--port", "0"), "GGUF")
    cut = tmp_path / "cut.gguf"
    with smollm2.open("rb") as file:
        cut.write_bytes(file.read(20 << 20))
    check_refused(run("serve", str(cut), "--port", "0"), "cut.gguf")


def test_a_busy_port_is_refused_before_anything_is_loaded(smollm2: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        check_refused(run("serve", str(smollm2), "--port", port), port, "--port")


def test_no_memory_for_the_pool_is_refused(smollm2: Path) -> None:
    done = run("serve", str(smollm2), "--port", "0", "--kv-memory", "900TiB")
    check_refused(done, "memory", "--kv-memory")
    check_refused(run("serve", str(smollm2), "--port", "0", "--kv-memory", "1KiB"), "--kv-memory")


def test_a_template_with_an_error_is_refused(tmp_path: Path, smollm2: Path) -> None:
    broken = tmp_path / "t.jinja"
    broken.write_text("{% for %}")
    done = run("serve", str(smollm2), "--port", "0", "--chat-template", str(broken))
    check_refused(done, "line 1", "--chat-template")


def test_the_doctor_says_what_is_missing(tmp_path: Path) -> None:
    done = run("doctor", "--json", PAGEMILL_HOME=str(tmp_path))
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert findings["model"]["mend"] == "pagemill pull smollm2-135m"
    assert done.returncode == 1
    assert "GB/s" in findings["memory read"]["value"]
    kept = (tmp_path / "machine.json").read_text()
    again = run("doctor", "--json", PAGEMILL_HOME=str(tmp_path))
    assert again.stdout == done.stdout
    assert (tmp_path / "machine.json").read_text() == kept


@pytest.fixture
def process(smollm2: Path) -> Iterator["subprocess.Popen[str]"]:
    flags = ("--port", "0", "--num-blocks", "300", "--dtype", "float32")
    with subprocess.Popen(
        [*COMMAND, "serve", str(smollm2), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        yield running
        running.kill()


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://[\d.:]+", line):
            return found.group(0)
    raise AssertionError("the server did not start")


def test_sigterm_drains_what_runs(process: "subprocess.Popen[str]") -> None:
    url = url_of(process)
    answers: list[httpx.Response] = []
    body = {"prompt": "One, two,", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    client = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    )
    client.start()
    while "num_requests_running" not in (text := httpx.get(f"{url}/metrics").text) or not (
        re.search(r"num_requests_running\{[^}]*\} 1", text)
    ):
        assert client.is_alive()
    process.send_signal(signal.SIGTERM)
    client.join()
    assert process.wait(timeout=60) == 0
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 60
    assert process.stdout is not None and "has stopped" in process.stdout.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
