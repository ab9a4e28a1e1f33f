"""The command as a process: help, errors of one line, a drain on SIGTERM, the doctor."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pagemill.cli import doctor
from pagemill.cli.main import main

COMMAND = (sys.executable, "-m", "pagemill.cli.main")


@dataclass
class Done:
    """What a command gave."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process."""

    def call(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return call


@pytest.mark.parametrize("command", [(), ("serve",), ("explain",), ("pull",), ("doctor",)])
def test_help_can_be_read(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.code == 0
    assert done.out.startswith("usage: ")
    assert all(len(line) < 120 for line in done.out.splitlines())


def check_refused(done: Done, *words: str) -> None:
    assert done.code == 1
    assert done.err.startswith("pagemill: "), done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


def test_an_error_of_a_process_is_one_line() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "no-such-model", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    check_refused(Done(done.returncode, done.stdout, done.stderr), "no-such-model", "GGUF")
    assert done.stderr.count("\n") == 1


def test_wrong_models_are_refused_in_one_line(run: Run, tmp_path: Path, smollm2: Path) -> None:
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


def test_a_busy_port_is_refused_before_anything_is_loaded(run: Run, smollm2: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        check_refused(run("serve", str(smollm2), "--port", port), port, "--port")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused(run: Run, smollm2: Path, host: str) -> None:
    """Unknown, or known and elsewhere: the advice is about the host, not about the port."""
    done = run("serve", str(smollm2), "--host", host, "--port", "0")
    check_refused(done, host, "--host")
    assert "--port" not in done.err


def test_no_memory_for_the_pool_is_refused(run: Run, smollm2: Path) -> None:
    done = run("serve", str(smollm2), "--port", "0", "--kv-memory", "900TiB")
    check_refused(done, "memory", "--kv-memory")
    check_refused(run("serve", str(smollm2), "--port", "0", "--kv-memory", "1KiB"), "--kv-memory")


def test_a_template_with_an_error_is_refused(run: Run, tmp_path: Path, smollm2: Path) -> None:
    broken = tmp_path / "t.jinja"
    broken.write_text("{% for %}")
    done = run("serve", str(smollm2), "--port", "0", "--chat-template", str(broken))
    check_refused(done, "line 1", "--chat-template")


def test_the_doctor_says_what_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path))
    done = run("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(done.out)}
    assert findings["model"]["mend"] == "pagemill pull smollm2-135m"
    assert done.code == 1
    assert "GB/s" in findings["memory read"]["value"]
    kept = (tmp_path / "machine.json").read_text()
    again = json.loads(run("doctor", "--json").out)
    rates = ("memory read", "GEMM float32", "GEMM bfloat16")
    assert all(findings[f["name"]] == f for f in again if f["name"] in rates)
    assert (tmp_path / "machine.json").read_text() == kept


def test_the_doctors_table_shows_commands_as_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup: without the extra the command would mend nothing."""
    monkeypatch.setattr(doctor, "ENGINE_MODULES", ("no_such_module",))
    done = run("doctor")
    assert done.code == 1
    assert "in pagemill's checkout: pip install '.[engine]'" in done.out


@pytest.mark.parametrize("port", ["99999", "-1", "0", "65536", "9" * 5000, "8000.5", "²"])
def test_the_doctor_refuses_what_is_no_port(run: Run, port: str) -> None:
    done = run("doctor", f"--port={port}")
    assert done.code == 2 and "is no port: give 1 to 65535" in done.err


@contextmanager
def started(model: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    flags = ("--port", "0", "--num-blocks", "300", "--dtype", "float32", *flags)
    with subprocess.Popen(
        [*COMMAND, "serve", str(model), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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


def wait_until_running(url: str, client: threading.Thread) -> None:
    while not re.search(r"num_requests_running\{[^}]*\} 1", httpx.get(f"{url}/metrics").text):
        assert client.is_alive()


def check_stopped(process: "subprocess.Popen[str]", url: str) -> None:
    """It ended well, said so, and nothing went wrong on the way."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "has stopped" in out
    assert "Traceback" not in err and "ERROR" not in err, err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


BODY = {"prompt": "One, two,", "temperature": 0, "ignore_eos": True}


def test_sigterm_drains_what_runs(smollm2: Path) -> None:
    with started(smollm2, "--drain-timeout", "120") as process:
        url = url_of(process)
        answers: list[httpx.Response] = []
        body = {**BODY, "max_tokens": 40}
        client = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            )
        )
        client.start()
        wait_until_running(url, client)
        process.send_signal(signal.SIGTERM)
        client.join()
        check_stopped(process, url)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("second", [signal.SIGTERM, None])
def test_sigterm_ends_what_outlasts_the_drain_time(
    smollm2: Path, second: signal.Signals | None
) -> None:
    """The stream's last events are an error of the API and the end mark; a second SIGTERM, as some
    managers send, changes nothing."""
    with started(smollm2, "--drain-timeout", "1") as process:
        url = url_of(process)
        lines: list[str] = []
        body = {**BODY, "max_tokens": 4000, "stream": True}

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        client = threading.Thread(target=read)
        client.start()
        wait_until_running(url, client)
        process.send_signal(signal.SIGTERM)
        if second is not None:
            process.send_signal(second)
        client.join()
        check_stopped(process, url)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["type"] == "service_unavailable_error"


def test_a_second_interrupt_ends_at_once(smollm2: Path) -> None:
    """Ctrl-C twice: whoever still waits is cut off, and the process does not sit out the hour."""
    with started(smollm2, "--drain-timeout", "3600") as process:
        url = url_of(process)

        def ask() -> None:
            with suppress(httpx.TransportError):
                httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 4000}, timeout=60)

        client = threading.Thread(target=ask)
        client.start()
        wait_until_running(url, client)
        process.send_signal(signal.SIGINT)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        client.join()
    assert process.returncode == 0, err
    assert "has stopped" in out
    assert "loop is closed" not in err
