"""The kernels compile for real GPUs, which needs none; the interpreter knows no such limits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "model" / "gpu_compile.py"


@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_and_fits(capability: str, tmp_path: Path) -> None:
    """All formats at head size 64, for an A100 and an H100: no kernel takes more shared memory than
    smaller GPUs have. In a process of its own, without the interpreter."""
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), capability, "64"],
        env=settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("bytes shared") == 6 * 3 + 2
