"""What the benchmarks share: flags, the machine, servers as processes, and the RESULT line."""

import argparse
import atexit
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("PAGEMILL_DATA", ROOT.parent / "shared" / "data"))


def make_parser(words: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--quick", action="store_true", help="a smaller run, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser


def needed(path: Path, source: str) -> Path:
    """``path`` where it is there; else one line that says what to bring, and the end."""
    if path.is_file():
        return path
    sys.exit(
        f"{path} is not there: it is {source}. docs/benchmarks.md says how to make the file; set"
        f" PAGEMILL_DATA to the folder that has {path.parent.name}/{path.name}"
    )


def finish(figures: dict[str, Any], keys: tuple[str, ...], path: Path | None) -> None:
    """Write the JSON and print the last line: RESULT key=value ..."""
    figures = {**figures, "machine": machine()}
    if path is not None:
        path.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    words = (f"{key}={_short(figures[key])}" for key in keys)
    print("RESULT", *words)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower()


def machine() -> str:
    """Processor, cores and Python of this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8"))
        name = found.group(1) if found else name
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


class Server:
    """``pagemill serve`` as a process of its own, on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "pagemill.cli.main", "serve", model, "--port", "0", *flags]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that atexit runs
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.kill)
        self.lines: list[str] = []
        self.url = self._wait()

    def _wait(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if found := re.search(r"http://[\d.]+:\d+", line):
                return found.group(0)
        raise SystemExit("the server did not start:\n" + "\n".join(self.lines))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)
