"""``--weight-format``: what is chosen, what is said, what is counted, what is refused."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoints import random_model, save_folder
from model.gguf_files import write_gguf
from pagemill.core.config import EngineConfig
from pagemill.core.errors import ConfigError
from pagemill.engine.build import BuiltEngine, build_engine


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(random_model("smollm", hidden_size=96), path, lambda _: Kind.Q4_1)


def build(model: Path, key_file: Path, **settings: str) -> BuiltEngine:
    built = build_engine(
        EngineConfig(model=str(model), num_blocks=8, cache_key_file=key_file, **settings)
    )
    built.engine.close()
    return built


def test_packed_is_taken_where_it_can_be_and_counted(file: Path, key_file: Path) -> None:
    built = build(file, key_file)
    weights = built.model.weights
    assert any(line.startswith("weights packed (") for line in built.choices)
    assert weights.num_packed_bytes() == weights.num_bytes()
    wide = build(file, key_file, weight_format="bf16")
    assert any(line.startswith("weights bfloat16 (") for line in wide.choices)
    assert wide.model.weights.num_packed_bytes() == 0
    assert 3.1 < wide.model.weights.num_bytes() / weights.num_bytes() < 3.3  # 16 bits to 5


def test_float32_stays_float32(file: Path, key_file: Path) -> None:
    built = build(file, key_file, dtype="float32")
    assert built.model.weights.num_packed_bytes() == 0
    assert any(line.startswith("weights float32 (") for line in built.choices)
    for weight_format in ("packed", "bf16"):
        with pytest.raises(ConfigError, match="exclude each other"):
            build(file, key_file, dtype="float32", weight_format=weight_format)


def test_a_folder_has_nothing_packed(tmp_path: Path, key_file: Path) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "model")
    assert any(line.startswith("weights bfloat16") for line in build(folder, key_file).choices)
    with pytest.raises(ConfigError, match="no weights of a type"):
        build(folder, key_file, weight_format="packed")


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match="weight_format is 'int2'"):
        EngineConfig(model="m", weight_format="int2")
