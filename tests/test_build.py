"""How the extension is built: strictly by us, leniently by users."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize("strict", [False, True])
def test_a_warning_stops_our_builds_only(tmp_path: Path, strict: bool) -> None:
    """A compiler that comes out tomorrow warns about more; an installation must not end there."""
    flags = ["-DPAGEMILL_TESTS=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    flags += ["-DPAGEMILL_STRICT=ON"] if strict else []
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), *flags]
    subprocess.run(command, check=True, capture_output=True)
    entries = json.loads((tmp_path / "compile_commands.json").read_text())
    assert len(entries) > 5
    for entry in entries:
        assert "-Wall -Wextra" in entry["command"]
        assert ("-Werror" in entry["command"]) is strict, entry["file"]


def test_our_own_builds_are_strict() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--editable '.[engine,dev]' $(STRICT)" in makefile
    assert "--editable '.[engine]'\n" in makefile
    assert "-DPAGEMILL_STRICT=ON" in (ROOT / "scripts" / "asan-fuzz").read_text()
