"""The machine's limits: memory read rate and GEMM rates, measured once and kept in a file."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

READ_BYTES = 512 << 20
GEMM_SIZE = 1024
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Medians. ``read_bytes_s``: sequential reads by all threads; GEMM of 1024 x 1024 matrices."""

    machine: str
    threads: int
    read_bytes_s: float
    gemm_float32_flops_s: float
    gemm_bfloat16_flops_s: float


def machine_rates(path: Path, *, again: bool = False) -> MachineRates:
    """The kept rates of this machine, or new ones where none fit it."""
    if not again and (kept := _kept(path)) is not None:
        return kept
    rates = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(rates), indent=1), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        pass  # a folder that cannot be written costs a new measurement next time
    return rates


def _kept(path: Path) -> MachineRates | None:
    try:
        rates = MachineRates(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    same = rates.machine == _machine() and rates.threads == torch.get_num_threads()
    return rates if same else None


def _machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model")]
        name = " ".join(dict.fromkeys(names)) or name
    except OSError:
        pass
    return f"{name} x{os.cpu_count()}"


def measure() -> MachineRates:
    """Measure now; takes a few seconds and all threads."""
    return MachineRates(
        machine=_machine(),
        threads=torch.get_num_threads(),
        read_bytes_s=_read_rate(),
        gemm_float32_flops_s=_gemm_rate(torch.float32),
        gemm_bfloat16_flops_s=_gemm_rate(torch.bfloat16),
    )


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _read_rate() -> float:
    """A sum over memory that no cache holds reads each byte once."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    return READ_BYTES / _median_s(data.sum)


def _gemm_rate(dtype: torch.dtype) -> float:
    size = GEMM_SIZE if dtype == torch.float32 else GEMM_SIZE // 2
    left = torch.randn(size, size).to(dtype)
    right = torch.randn(size, size).to(dtype)
    return float(2 * size**3 / _median_s(lambda: left @ right))
