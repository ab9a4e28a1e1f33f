"""Settings: flags, vLLM's names, a TOML file, and what wins."""

import json
from pathlib import Path

import pytest

from pagemill.cli.main import make_parser
from pagemill.cli.main import parse as parse_arguments
from pagemill.cli.options import read_settings
from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.core.errors import ConfigError

EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv", "hwm": 9}'


def parse(*flags: str) -> tuple[EngineConfig, ServerConfig]:
    return read_settings(parse_arguments(["serve", *flags]))


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


@pytest.mark.parametrize(
    ("flags", "keys", "names"),
    [
        ("--api-key k m", ("k",), ()),
        ("--api-key=k m", ("k",), ()),
        ("--api-key k --api-key l m", ("k", "l"), ()),
        ("--served-model-name n --api-key k m", ("k",), ("n",)),
        ("--no-enable-prefix-caching --port 1 --api-key k m", ("k",), ()),
        ("m --api-key k l --served-model-name n o p", ("k", "l"), ("n", "o", "p")),
        ("--api-key k l --model m", ("k", "l"), ()),
        ("--model=m --served-model-name n o --port 1", (), ("n", "o")),
        ("--api-key k -- m", ("k",), ()),
    ],
)
def test_flags_of_several_values_never_swallow_the_model(
    flags: str, keys: tuple[str, ...], names: tuple[str, ...]
) -> None:
    engine, server = parse(*flags.split())
    assert (engine.model, server.api_keys, server.served_model_names) == ("m", keys, names)


def test_a_models_name_never_becomes_a_key(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('model = "other"')
    engine, server = parse("--config", str(tmp_path / "s.toml"), "--api-key", "k", "m")
    assert (engine.model, server.api_keys) == ("m", ("k",))


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


@pytest.mark.parametrize(
    ("line", "prefix_index"),
    [
        ("enable-prefix-caching = true", "radix"),
        ("enable_prefix_caching = false", "off"),
        ("no-enable-prefix-caching = true", "off"),
        ("no_enable_prefix_caching = false", "radix"),
    ],
)
def test_vllms_switch_in_a_file(tmp_path: Path, line: str, prefix_index: str) -> None:
    file = tmp_path / "s.toml"
    for text in (f'prefix-index = "off"\n{line}', f'[engine]\nprefix-index = "flat"\n{line}'):
        file.write_text(text)
        assert parse("m", "--config", str(file))[0].prefix_index == prefix_index
    assert parse("m", "--config", str(file), "--prefix-index", "off")[0].prefix_index == "off"


def test_every_flag_is_also_a_setting_of_a_file(tmp_path: Path) -> None:
    """vLLM's names too: what the command line takes, the file takes, and it means the same."""
    values = {
        "dtype": "float32", "kv-format": "bf16", "kv-cache-dtype": "bfloat16", "block-size": 64,
        "device": "auto",
        "prefix-index": "off", "scheduling-policy": "priority", "host": "::1", "port": 1,
        "metrics-prefix": "vllm", "eviction": "arc", "kv-format-force": "on",
        "weight-format": "packed",
        "tenant-quota": 0.5, "fair-share": "on", "drain-timeout": 2.5, "kv-memory": "1GiB",
        "kv-cache-memory-bytes": 4096, "enable-prefix-caching": True,
        "kv-events-endpoint": "tcp://*:7", "kv-events-config": EVENTS,
    }  # fmt: skip
    parser = make_parser()
    (serve,) = (a.choices["serve"] for a in parser._actions if isinstance(a.choices, dict))
    flags = [f for action in serve._actions for f in action.option_strings if f.startswith("--")]
    assert len(flags) > 25
    for flag in flags:
        name = flag.removeprefix("--")
        if name in ("help", "config", "model"):
            continue
        value = values.get(name.removeprefix("no-"), 7)
        written = str(value).lower() if isinstance(value, bool) else json.dumps(value)
        (tmp_path / "s.toml").write_text(f"{name} = {written}")
        given = (flag,) if isinstance(value, bool) else (flag, str(value))
        expected = parse("m", *given)
        assert expected != parse("m") or name == "enable-prefix-caching", name
        assert parse("m", "--config", str(tmp_path / "s.toml")) == expected, name


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", "secret")
    assert parse("m")[1].api_keys == ("secret",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1", "no setting 'colour'"),
        ("num-blocks = true", "num-blocks"),
        ("enable-prefix-caching = 1", "enable-prefix-caching: 1: give true or false"),
        ('kv-memory = "lots"', "not a size"),
        ("model = ", "cannot be read"),
        ("x = " + "[" * 5000 + "]" * 5000, "cannot be read"),
        (f"num-blocks = {'9' * 400}", "num_blocks is too large"),
        (f"kv-memory = {'9' * 400}", "more than any memory"),
        ("api-key = []", "api-key: an empty list says nothing: leave the line out"),
        ("served-model-name = []", "served-model-name: an empty list"),
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
        (("m", "--threads", "9" * 400), "too large"),
        (("m", "--num-blocks", "9" * 400), "too large"),
        (("m", "--max-num-seqs", "9" * 400), "too large"),
        (("m", "--threads", "0"), "^--threads is 0: it must be at least 1"),
        (("m", "--port", "70000"), "between 0 and 65535"),
        (("m", "--metrics-prefix", "x"), "choose one of pagemill, vllm"),
        (("m", "--scheduling-policy", "lifo"), "fcfs"),
        (("m", "--eviction", "best"), "choose one of lru"),
    ],
)
def test_a_wrong_flag_names_the_setting(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(*flags)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--num-blocks", "many", "num-blocks"),
        ("--kv-memory", "9" * 400, "more than any memory"),
        ("--kv-memory", "9" * 400 + "TiB", "more than any memory"),
        ("--kv-memory", "8388608TiB", "more than any memory"),
        ("--num-blocks", "9" * 5000, "num-blocks"),
    ],
)
def test_a_flag_that_is_no_number_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, words: str
) -> None:
    with pytest.raises(SystemExit):
        parse("m", flag, value)
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b'model = "\xff\xfe"')
    with pytest.raises(ConfigError, match=r"settings file .* cannot be read"):
        parse("m", "--config", str(tmp_path / "s.toml"))


def test_vllms_json_of_kv_events_and_the_flags_that_win() -> None:
    _, server = parse("m", "--kv-events-config", EVENTS)
    assert server == ServerConfig(
        kv_events_endpoint="tcp://*:5557", kv_events_topic="kv", kv_events_hwm=9
    )
    _, server = parse("m", "--kv-events-config", EVENTS, "--kv-events-topic", "mine")
    assert (server.kv_events_topic, server.kv_events_hwm) == ("mine", 9)
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "null"}', "{}"):
        assert parse("m", "--kv-events-config", off)[1] == ServerConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"colour": 1}', "no setting 'colour'"),
        ('{"publisher": "kafka"}', "zmq or null"),
        ('{"hwm": "many"}', "hwm is 'many'"),
        ('{"topic": 5}', "topic is 5"),
    ],
)
def test_wrong_json_of_kv_events_is_refused(
    capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    with pytest.raises(SystemExit):
        parse("m", "--kv-events-config", text)
    assert words in capsys.readouterr().err


def test_sizes_of_kv_events_are_checked() -> None:
    with pytest.raises(ConfigError, match="kv_events_hwm is 0"):
        parse("m", "--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 0}')
