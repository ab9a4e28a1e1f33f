"""An engine on the Triton kernels: probe of the keys, memory, prefix hits, greedy answers."""

from pathlib import Path

import pytest

from model.checkpoints import random_prompt
from model.gpu_case import KERNELS
from model.tiny_engine import Run, TinyEngine, tiny_checkpoint
from pagemill.engine import build, kv_probe
from pagemill.kernels.triton.storage import TritonStorage

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROMPT = random_prompt(40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), "llama")


def ask_twice(checkpoint: Path, key_file: Path, kv_format: str) -> list[Run]:
    """A prompt, and a longer one that begins with it."""
    engine = TinyEngine(
        checkpoint, key_file, kv_format=kv_format, kv_format_force="on", num_blocks=20,
        max_num_seqs=2,
    )  # fmt: skip
    try:
        return [engine.ask(PROMPT, 2), engine.ask([*PROMPT, 5, 6, 7], 2)]
    finally:
        engine.close()


@pytest.mark.parametrize(("kv_format", "most"), [("fp32", 1e-4), ("f8", 0.02), ("i4c", 0.2)])
def test_answers_are_the_cpus(
    checkpoint: Path, key_file: Path, kv_format: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly the same log-probabilities, the second prompt from the cache. (The CPU rounds the
    queries for i4c.)"""
    monkeypatch.setattr(kv_probe, "NUM_TOKENS", 32)
    here = ask_twice(checkpoint, key_file, kv_format)
    monkeypatch.setattr(build, "choose_kernels", lambda _: KERNELS)
    used: list[object] = []
    make = TritonStorage.__init__
    monkeypatch.setattr(
        TritonStorage, "__init__", lambda s, *a, **k: (used.append(s), make(s, *a, **k))[1]
    )
    there = ask_twice(checkpoint, key_file, kv_format)
    assert used, "the engine did not use the storage on the device"
    assert there[1].num_cached_tokens == here[1].num_cached_tokens > 30
    for one, other in zip(here, there, strict=True):
        assert one.distance(other) < most
