"""Options of ``pagemill serve`` as one table: flags, vLLM's names for them, and a TOML file."""

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.cli.kv_events_config import KV_EVENTS_SIZES, read_kv_events_config
from pagemill.core.config import (
    DEVICES,
    DTYPES,
    KV_FORMATS,
    POLICIES,
    WEIGHT_FORMATS,
    EngineConfig,
    ServerConfig,
)
from pagemill.core.errors import ConfigError
from pagemill.core.layers import BLOCK_SIZES, EVICTIONS, PREFIX_INDEXES
from pagemill.core.units import parse_bytes


def _kv_format(text: str) -> str:
    """vLLM's names of cache types mean the same bytes."""
    return {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(text, text)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. ``target`` is the field of EngineConfig or ServerConfig that it fills."""

    target: str
    flags: tuple[str, ...]
    kind: Callable[[str], Any]
    words: str
    metavar: str
    many: bool = False


def _one_of(choices: tuple[Any, ...]) -> str:
    return "{" + ",".join(map(str, choices)) + "}"


ENGINE_OPTIONS = (
    Option(
        "device",
        ("--device",),
        str,
        "where to compute; auto: cuda where a device and Triton are there (cpu)",
        _one_of(DEVICES),
    ),
    Option(
        "dtype",
        ("--dtype",),
        str,
        "type of the weights; auto: what is fastest here",
        _one_of(DTYPES),
    ),
    Option(
        "weight_format",
        ("--weight-format",),
        str,
        "packed: weights stay as a GGUF file has them; auto: so where they can (auto)",
        _one_of(WEIGHT_FORMATS),
    ),
    Option(
        "kv_format",
        ("--kv-format", "--kv-cache-dtype"),
        _kv_format,
        "number format of the KV cache; auto: the computing type",
        _one_of(KV_FORMATS),
    ),
    Option(
        "kv_skip_layers",
        ("--kv-skip-layers", "--kv-cache-dtype-skip-layers"),
        str,
        "layers that stay in bf16: numbers, ranges as 0-2, or window",
        "LAYER",
        many=True,
    ),
    Option(
        "kv_format_force",
        ("--kv-format-force",),
        str,
        "on: keep the KV format although it does not suit the model (off)",
        "{on,off}",
    ),
    Option(
        "num_blocks",
        ("--num-blocks", "--num-gpu-blocks-override"),
        int,
        "size of the block pool in blocks",
        "N",
    ),
    Option(
        "kv_memory_bytes",
        ("--kv-memory", "--kv-cache-memory-bytes"),
        parse_bytes,
        "size of the block pool as memory, as 2GiB; default: 30 %% of what is free (GPU: 80 %%)",
        "SIZE",
    ),
    Option("block_size", ("--block-size",), int, "tokens a block (16)", _one_of(BLOCK_SIZES)),
    Option(
        "max_model_len",
        ("--max-model-len",),
        int,
        "longest context; default: the model's",
        "TOKENS",
    ),
    Option("max_num_seqs", ("--max-num-seqs",), int, "sequences that run at a time (64)", "N"),
    Option(
        "max_num_batched_tokens",
        ("--max-num-batched-tokens",),
        int,
        "token budget of a step (512)",
        "TOKENS",
    ),
    Option("max_queue", ("--max-queue",), int, "requests that may wait; more get 429 (1024)", "N"),
    Option(
        "scheduling_policy",
        ("--scheduling-policy",),
        str,
        "order of requests (fcfs)",
        _one_of(POLICIES),
    ),
    Option(
        "prefix_index",
        ("--prefix-index",),
        str,
        "how shared prefixes are found: radix to the token, flat in whole blocks (radix)",
        _one_of(PREFIX_INDEXES),
    ),
    Option(
        "eviction",
        ("--eviction",),
        str,
        "which cached blocks go first; reuse_rank learns from the traffic (reuse_rank)",
        _one_of(EVICTIONS),
    ),
    Option(
        "tenant_quota",
        ("--tenant-quota",),
        float,
        "part of the pool that one API key's cached blocks may fill (1)",
        "PART",
    ),
    Option(
        "fair_share",
        ("--fair-share",),
        str,
        "when blocks are short, who has most cached loses first (off)",
        "{on,off}",
    ),
    Option(
        "cache_key_file",
        ("--cache-key-file",),
        Path,
        "32 secret bytes that key the block hashes; made at the first start",
        "FILE",
    ),
    Option(
        "chat_template", ("--chat-template",), Path, "a Jinja chat template for the model", "FILE"
    ),
    Option("num_threads", ("--threads",), int, "compute threads; default: the cores", "N"),
)

SERVER_OPTIONS = (
    Option("host", ("--host",), str, "address to listen on (127.0.0.1)", "HOST"),
    Option("port", ("--port",), int, "port to listen on (8000); 0 takes a free one", "PORT"),
    Option(
        "served_model_names",
        ("--served-model-name",),
        str,
        "name that clients use; default: the model's; may be given again for further names",
        "NAME",
        many=True,
    ),
    Option(
        "api_keys",
        ("--api-key",),
        str,
        "key that clients must send, again for each further one; also from $PAGEMILL_API_KEY",
        "KEY",
        many=True,
    ),
    Option(
        "operator_key",
        ("--operator-key",),
        str,
        "key of the one who may drop from the cache; also from $PAGEMILL_OPERATOR_KEY",
        "KEY",
    ),
    Option(
        "max_cache_priority",
        ("--max-cache-priority",),
        int,
        "the highest cache_priority that a request may ask for (100)",
        "N",
    ),
    Option(
        "metrics_prefix",
        ("--metrics-prefix",),
        str,
        "prefix of the metrics; vllm gives vLLM's exact names",
        "{pagemill,vllm}",
    ),
    Option(
        "drain_timeout_s",
        ("--drain-timeout",),
        float,
        "seconds that running requests get after SIGTERM (30)",
        "S",
    ),
    Option(
        "kv_events_endpoint",
        ("--kv-events-endpoint",),
        str,
        "publish KV events in vLLM's form over ZMQ, as tcp://*:5557",
        "ADDRESS",
    ),
    Option(
        "kv_events_replay_endpoint",
        ("--kv-events-replay-endpoint",),
        str,
        "where subscribers ask for KV events that they missed",
        "ADDRESS",
    ),
    Option("kv_events_topic", ("--kv-events-topic",), str, "topic of the KV events", "TOPIC"),
    Option(
        "kv_events_buffer_steps",
        ("--kv-events-buffer-steps",),
        int,
        "batches of KV events kept for replay (10000)",
        "N",
    ),
)

MANY_FLAGS = tuple(
    flag for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS) if option.many for flag in option.flags
)

CONFIG_OPTIONS = (
    Option(
        "kv_events_config",
        ("--kv-events-config",),
        read_kv_events_config,
        "vLLM's JSON for the settings of KV events",
        "JSON",
    ),
)
"""Each gives several settings at once; a setting that is given by itself wins."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A yes-or-no name of vLLM's for a setting that has more values here."""

    target: str
    name: str
    yes: str
    no: str


SWITCHES = (Switch("prefix_index", "enable-prefix-caching", yes="radix", no="off"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    for title, options in (
        ("engine", ENGINE_OPTIONS),
        ("server", (*SERVER_OPTIONS, *CONFIG_OPTIONS)),
    ):
        group = parser.add_argument_group(title)
        for option in options:
            group.add_argument(
                *option.flags,
                dest=option.target,
                type=_checked(option),
                help=option.words,
                metavar=option.metavar,
                action="append" if option.many else "store",
            )
    for switch in SWITCHES:
        for flag, value in ((f"--{switch.name}", switch.yes), (f"--no-{switch.name}", switch.no)):
            parser.add_argument(
                flag,
                dest=switch.target,
                action="store_const",
                const=value,
                help=argparse.SUPPRESS,
            )


def _checked(option: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return option.kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def read_settings(parsed: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Defaults, then the TOML file, then the environment's key, then flags. ConfigError names
    the setting that is wrong."""
    values = _from_file(parsed.config) if parsed.config else {}
    if key := os.environ.get("PAGEMILL_API_KEY"):
        values.setdefault("api_keys", [key])
    if key := os.environ.get("PAGEMILL_OPERATOR_KEY"):
        values.setdefault("operator_key", key)
    for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS, *CONFIG_OPTIONS):
        given = getattr(parsed, option.target)
        if given is not None:
            values[option.target] = given
    if name := parsed.model or parsed.model_flag:
        values["model"] = name
    if "num_blocks" in values and parsed.kv_memory_bytes and not parsed.num_blocks:
        del values["num_blocks"]  # a flag replaces the file's other way of saying it
    if "kv_memory_bytes" in values and parsed.num_blocks and not parsed.kv_memory_bytes:
        del values["kv_memory_bytes"]
    values = {**values.get("kv_events_config", {}), **values}
    engine, server = _fields(ENGINE_OPTIONS, values), _fields(SERVER_OPTIONS, values)
    server |= {name: values[name] for name in KV_EVENTS_SIZES if name in values}
    return EngineConfig(model=values.get("model", ""), **engine), ServerConfig(**server)


def _fields(options: Sequence[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        o.target: tuple(values[o.target]) if o.many else values[o.target]
        for o in options
        if o.target in values
    }


def _from_file(path: Path) -> dict[str, Any]:
    """Settings of a TOML file: flag names, vLLM's among them, with - or _."""
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8 and no TOML are ValueError
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from error
    by_name = {
        flag.removeprefix("--"): option
        for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS, *CONFIG_OPTIONS)
        for flag in option.flags
    }
    values: dict[str, Any] = {}
    for name, value in _flat(raw).items():
        dashed = name.replace("_", "-")
        switch = next((s for s in SWITCHES if s.name == dashed.removeprefix("no-")), None)
        if name == "model":
            values["model"] = str(value)
        elif switch is not None:
            is_yes = _yes_or_no(path, name, value) is not dashed.startswith("no-")
            values[switch.target] = switch.yes if is_yes else switch.no
        elif dashed in by_name:
            option = by_name[dashed]
            values[option.target] = _file_value(path, name, option, value)
        else:
            raise ConfigError(f"{path}: there is no setting {name!r}; see pagemill serve --help")
    return values


def _yes_or_no(path: Path, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name}: {value!r}: give true or false")
    return value


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings may stand at the top or in tables [engine] and [server]."""
    flat = {k: v for k, v in raw.items() if not (k in ("engine", "server") and isinstance(v, dict))}
    for table in ("engine", "server"):
        if isinstance(raw.get(table), dict):
            flat.update(raw[table])
    return flat


def _file_value(path: Path, name: str, option: Option, value: Any) -> Any:
    items = value if isinstance(value, list) and option.many else [value]
    try:
        if not items:
            raise ValueError("an empty list says nothing: leave the line out, or name one")
        if any(isinstance(item, bool | dict | list) for item in items):
            raise ValueError(f"{value!r} is not a value for it")
        converted = [option.kind(str(item)) for item in items]
    except ValueError as error:
        raise ConfigError(f"{path}: {name}: {error}") from error
    return converted if option.many else converted[0]
