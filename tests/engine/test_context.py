"""How long a context is, and how many blocks: what a config declares is not believed."""

import json
from pathlib import Path

import pytest

from model.checkpoints import random_prompt
from model.tiny_engine import TinyEngine, tiny_checkpoint
from pagemill.core.errors import ConfigError


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that declares more positions than any memory has tables for."""
    folder = tiny_checkpoint(tmp_path, "llama")
    about = json.loads((folder / "config.json").read_text())
    about["max_position_embeddings"] = (1 << 31) - 1
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_a_context_without_end_is_cut_and_said(endless: Path, key_file: Path) -> None:
    tiny = TinyEngine(endless, key_file)
    assert tiny.built.max_model_len == 131_072
    assert "the model declares 2147483647 tokens: --max-model-len" in tiny.built.choices[1]
    assert tiny.ask([5, 6, 7], 3).token_ids
    tiny.close()


def test_more_is_taken_where_it_is_asked_for(endless: Path, key_file: Path) -> None:
    tiny = TinyEngine(endless, key_file, max_model_len=200_000)
    assert tiny.built.max_model_len == 200_000
    assert not any("declares" in line for line in tiny.built.choices)
    tiny.close()


def test_a_context_that_no_memory_holds_is_refused(endless: Path, key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"of memory.*lower --max-model-len"):
        TinyEngine(endless, key_file, max_model_len=(1 << 31) - 1)


def test_window_groups_get_no_more_blocks_than_were_asked_for(
    tmp_path: Path, key_file: Path
) -> None:
    tiny = TinyEngine(tiny_checkpoint(tmp_path, "gemma3"), key_file, num_blocks=30)
    assert tiny.built.cache_config.num_blocks == (30, 30)
    assert len(tiny.ask(random_prompt(400), 12).token_ids) == 12
    tiny.close()
