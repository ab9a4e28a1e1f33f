"""``pagemill doctor``: what this machine has, what is missing, and the command that mends it."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagemill.core.errors import install_command
from pagemill.core.units import GIB, format_bytes
from pagemill.models.home import KNOWN_MODELS, home_folder, known_model_path

ENGINE_MODULES = (
    "torch",
    "safetensors",
    "tokenizers",
    "jinja2",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus_client",
)
MAX_PORT = 65_535
MAX_DIGITS = 9
LOW_DISK_BYTES = 2 * GIB
LOW_MEMORY_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``mend`` is a command or advice where something is wrong."""

    name: str
    value: str
    mend: str | None = None


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has and what is missing",
        description="Look at the processor, memory, disk, ports and installed parts. The memory and"
        " GEMM rates are measured once and kept; --measure measures them again.",
    )
    parser.add_argument("--measure", action="store_true", help="measure the rates again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--port", type=_port_number, default=8000, help="the port to look at (8000)"
    )
    parser.set_defaults(run=run)


def _port_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:MAX_DIGITS]) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no port: give 1 to {MAX_PORT}")
    return int(text)


def run(parsed: argparse.Namespace) -> int:
    """0 where nothing is missing, else 1."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _python,
        _processor,
        _memory,
        _disk,
        _parts,
        lambda: _port(parsed.port),
        _models,
        lambda: _rates(again=parsed.measure),
    )
    findings = [finding for check in checks for finding in check()]
    if parsed.json:
        print(json.dumps([vars_of(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return 1 if any(finding.mend for finding in findings) else 0


def vars_of(finding: Finding) -> dict[str, str | None]:
    return {"name": finding.name, "value": finding.value, "mend": finding.mend}


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = "[red]x[/red]" if finding.mend else "[green]ok[/green]"
        table.add_row(mark, escape(finding.name), escape(finding.value))
        if finding.mend:
            table.add_row("", "", f"[yellow]{escape(finding.mend)}[/yellow]")
    Console().print(table)


def _python() -> list[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    mend = "install Python 3.11 or newer, then: python3.11 -m venv .venv" if old else None
    return [Finding("python", version, mend)]


def _processor() -> list[Finding]:
    from pagemill import _native

    found = ", ".join(_native.available_isas())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [Finding("processor", f"{platform.machine()}, {cores} cores, kernels: {found}")]


def _memory() -> list[Finding]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    mend = "close other programs: a small model needs 2 GiB" if total < LOW_MEMORY_BYTES else None
    return [Finding("memory", format_bytes(total), mend)]


def _disk() -> list[Finding]:
    home = home_folder()
    there = next(folder for folder in (home, *home.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    mend = None
    if not writable:
        mend = f"{there} is not writable: set PAGEMILL_HOME to a folder that is"
    elif free < LOW_DISK_BYTES:
        mend = f"free some space, or set PAGEMILL_HOME to another disk ({there} is nearly full)"
    return [Finding("disk", f"{format_bytes(free)} free at {there}", mend)]


def _parts() -> list[Finding]:
    missing = [name for name in ENGINE_MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        version = importlib.metadata.version("torch")
        return [Finding("engine parts", f"torch {version} and the others are here")]
    mend = f"in pagemill's checkout: {install_command('engine')}"
    return [Finding("engine parts", f"missing: {', '.join(missing)}", mend)]


def _port(port: int) -> list[Finding]:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        busy = probe.connect_ex(("127.0.0.1", port)) == 0
    other = port + 1 if port < MAX_PORT else port - 1
    mend = f"stop what listens there, or use: pagemill serve --port {other}" if busy else None
    return [Finding("port", f"{port} is {'in use' if busy else 'free'}", mend)]


def _models() -> list[Finding]:
    lines = []
    for name in KNOWN_MODELS:
        here = known_model_path(name).is_file()
        mend = None if here else f"pagemill pull {name}"
        lines.append(Finding("model", f"{name} {'is here' if here else 'is not here'}", mend))
    return lines


def _rates(*, again: bool) -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    from pagemill.kernels.machine import machine_rates

    rates = machine_rates(home_folder() / "machine.json", again=again)
    return [
        Finding("memory read", f"{rates.read_bytes_s / 1e9:.1f} GB/s with {rates.threads} threads"),
        Finding("GEMM float32", f"{rates.gemm_float32_flops_s / 1e9:.0f} GFLOP/s"),
        Finding("GEMM bfloat16", f"{rates.gemm_bfloat16_flops_s / 1e9:.0f} GFLOP/s"),
    ]
