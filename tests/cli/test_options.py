"""Settings: flags, vLLM's names, a TOML file, and what wins."""

import argparse
from pathlib import Path

import pytest

from pagemill.cli.main import make_parser
from pagemill.cli.options import read_settings
from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.core.errors import ConfigError


def parse(*flags: str) -> tuple[EngineConfig, ServerConfig]:
    parsed: argparse.Namespace = make_parser().parse_args(["serve", *flags])
    return read_settings(parsed)


def test_defaults_are_those_of_the_help() -> None:
    engine, server = parse("m")
    assert engine == EngineConfig(model="m")
    assert (server.host, server.port) == ("127.0.0.1", 8000)


def test_flags_fill_both_configs() -> None:
    engine, server = parse(
        "m", "--dtype", "float32", "--kv-memory", "2GiB", "--port", "0",
        "--served-model-name", "a", "b", "--api-key", "k", "--block-size", "32",
        "--eviction", "arc",
    )  # fmt: skip
    assert engine.eviction == "arc"
    assert (engine.dtype, engine.kv_memory_bytes, engine.block_size) == ("float32", 2 << 30, 32)
    assert (server.port, server.served_model_names, server.api_keys) == (0, ("a", "b"), ("k",))


def test_vllms_names_mean_the_same() -> None:
    engine, _ = parse(
        "--model", "m", "--kv-cache-dtype", "bfloat16", "--num-gpu-blocks-override", "77",
        "--no-enable-prefix-caching",
    )  # fmt: skip
    assert (engine.model, engine.kv_format, engine.num_blocks) == ("m", "bf16", 77)
    assert engine.prefix_index == "off"


def test_a_file_gives_settings_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        'model = "m"\nnum-blocks = 50\n[engine]\nmax_num_seqs = 3\neviction = "reuse_rank"\n'
        '[server]\nport = 9000\napi-key = ["a", "b"]\n'
    )
    engine, server = parse("--config", str(file))
    assert (engine.model, engine.num_blocks, engine.max_num_seqs) == ("m", 50, 3)
    assert engine.eviction == "reuse_rank"
    assert (server.port, server.api_keys) == (9000, ("a", "b"))
    engine, server = parse("--config", str(file), "--kv-memory", "1GiB", "--port", "1")
    assert (engine.num_blocks, engine.kv_memory_bytes, server.port) == (None, 1 << 30, 1)


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", "secret")
    assert parse("m")[1].api_keys == ("secret",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1", "no setting 'colour'"),
        ("num-blocks = true", "num-blocks"),
        ('kv-memory = "lots"', "not a size"),
        ("model = ", "cannot be read"),
    ],
)
def test_a_wrong_file_names_the_setting(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse("m", "--config", str(file))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "name a model"),
        (("m", "--dtype", "float16"), "choose one of auto"),
        (("m", "--kv-format", "i3"), "choose one of"),
        (("m", "--block-size", "8"), "choose one of"),
        (("m", "--num-blocks", "1"), "at least 2"),
        (("m", "--num-blocks", "9", "--kv-memory", "1G"), "not both"),
        (("m", "--max-num-seqs", "0"), "at least 1"),
        (("m", "--port", "70000"), "between 0 and 65535"),
        (("m", "--metrics-prefix", "x"), "choose one of pagemill, vllm"),
        (("m", "--scheduling-policy", "lifo"), "fcfs"),
        (("m", "--eviction", "best"), "choose one of lru"),
    ],
)
def test_a_wrong_flag_names_the_setting(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(*flags)


def test_a_flag_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("m", "--num-blocks", "many")
    assert "num-blocks" in capsys.readouterr().err
