"""The one place that names concrete classes: settings -> a running engine."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagemill.cache.manager import CacheManager
from pagemill.core.clock import SystemClock
from pagemill.core.config import EngineConfig
from pagemill.core.errors import ConfigError
from pagemill.core.events import CacheEvent
from pagemill.core.layers import CacheConfig
from pagemill.core.request import Request
from pagemill.core.units import ceil_div, format_bytes
from pagemill.engine.device import (
    GPU_MEMORY_SHARE,
    can_stay_packed,
    choose_kernels,
    free_gpu_bytes,
    move_weights,
)
from pagemill.engine.engine import Engine
from pagemill.engine.kv_choice import (
    block_bytes,
    describe_kv,
    key_centers,
    kv_formats,
    name_formats,
    tail_bytes,
    tokens_per_gib,
)
from pagemill.engine.kv_probe import suit_formats
from pagemill.engine.loop import Step
from pagemill.kernels.device import Kernels
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.threads import use_threads
from pagemill.models.config import ModelConfig
from pagemill.models.decoder import Decoder
from pagemill.models.home import find_model, fingerprint, server_key
from pagemill.models.loader import Model, load_model
from pagemill.models.rope import table_bytes
from pagemill.models.weights import Progress
from pagemill.runtime.cost import CostModel
from pagemill.runtime.model_runner import ModelRunner
from pagemill.sched.scheduler import Scheduler
from pagemill.sched.values import SchedulerConfig

MEMORY_SHARE = 0.3
"""Without --kv-memory or --num-blocks the pool takes at most this part of the free memory."""
WINDOW_SHARE = 0.5
"""Window groups take at most this part of the memory for KV."""
CACHED_WINDOWS = 1.25
"""Window groups hold this many times what running sequences need, to keep windows of others."""

DEFAULT_CONTEXT = 131_072
"""The longest context that is taken without being asked for: what a config declares may be any
number, and the tables of positions are built for all of it."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was chosen for it. ``choices`` are lines for a person."""

    engine: Engine
    model: Model
    cache_config: CacheConfig
    kv_format: str
    max_model_len: int
    choices: tuple[str, ...]


def build_engine(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_finish: Callable[[Request], None] | None = None,
    on_event: Callable[[CacheEvent], None] | None = None,
) -> BuiltEngine:
    """Load the model, divide the memory, and wire the parts. Raises PagemillError.

    All of it happens in the thread that will run the steps. An OpenMP runtime keeps a pool for each
    thread that ever computed, and once these are more than the cores, its workers stop spinning:
    each parallel product then waits for a sleeping thread.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagemill-run")
    try:
        return thread.submit(
            _build, config, thread, progress, on_step, on_finish, on_event
        ).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise


def _build(
    config: EngineConfig,
    thread: ThreadPoolExecutor,
    progress: Progress | None,
    on_step: Callable[[Step], None] | None,
    on_finish: Callable[[Request], None] | None,
    on_event: Callable[[CacheEvent], None] | None,
) -> BuiltEngine:
    if config.num_threads is not None:
        use_threads(config.num_threads)
    kernels = choose_kernels(config.device)
    dtype = _dtype(config.dtype)
    path = find_model(config.model)
    model = _load(config, path, dtype, kernels, progress)
    weight_format = describe_weights(config, model, dtype)
    max_len = _max_model_len(config, model.config)
    centers = key_centers(model.config, model.weights)
    model = replace(model, weights=move_weights(model.weights, kernels))
    decoder = Decoder(model.config, model.weights, max_len, kernels)
    formats, warnings = suit_formats(
        model,
        decoder,
        kv_formats(config, model.config, dtype),
        centers,
        is_forced=config.kv_format_force == "on",
    )
    cache_config = _divide(config, model.config, formats, max_len, _kv_bytes(config, kernels))
    storage = kernels.make_storage(
        cache_config,
        formats,
        model.config.num_kv_heads,
        model.config.head_dim,
        centers=centers,
        num_tails=cache_config.num_tails,
    )
    kind = f"{dtype}, packed" if model.weights.num_packed_bytes() else str(dtype)
    name = fingerprint(path, kind, describe_kv(formats, centers, config.block_size))
    key = server_key(config.cache_key_file)
    cache = CacheManager(cache_config, server_key=key, fingerprint=name, on_event=on_event)
    engine = Engine(
        scheduler=Scheduler(_scheduler_config(config, max_len), cache),
        cache=cache,
        executor=_runner(model, decoder, storage, thread),
        clock=SystemClock(),
        tokenizer=model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        on_step=on_step,
        on_finish=on_finish,
    )
    choices = _choices(config, weight_format, name_formats(formats), cache_config, storage, max_len)
    if config.max_model_len is None and max_len < model.config.max_positions:
        declared = model.config.max_positions
        line = f"the model declares {declared} tokens: --max-model-len asks for more than {max_len}"
        choices = (choices[0], line, *choices[1:])
    if kernels.device.type == "cuda":
        choices = (*choices, f"on {torch.cuda.get_device_name(kernels.device)}")
    choices = (*warnings, *choices, tokens_per_gib(model.config, config.block_size))
    return BuiltEngine(engine, model, cache_config, name_formats(formats), max_len, choices)


def _load(
    config: EngineConfig,
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Progress | None,
) -> Model:
    wants_packed = dtype == torch.bfloat16 and config.weight_format != "bf16"
    return load_model(
        path,
        dtype,
        template_file=config.chat_template,
        progress=progress,
        stays_packed=can_stay_packed(config.weight_format, kernels) and wants_packed,
    )


def _runner(
    model: Model, decoder: Decoder, storage: KVStorage, thread: ThreadPoolExecutor
) -> ModelRunner:
    cost = CostModel(
        config=model.config,
        weight_bytes=model.weights.num_bytes(),
        matrix_parameters=model.weights.num_matrix_parameters(),
        kv_token_bytes=tuple(map(storage.token_bytes, range(model.config.num_layers))),
    )
    return ModelRunner(decoder, storage, cost, thread)


def _scheduler_config(config: EngineConfig, max_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_queue=config.max_queue,
        max_model_len=max_len,
        policy=config.scheduling_policy,
    )


def _dtype(name: str) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.bfloat16  # half the bytes of a decode step


def describe_weights(config: EngineConfig, model: Model, dtype: torch.dtype) -> str:
    """``packed (83 MiB a step)``, ``bfloat16 (...)``, or both with their shares."""
    total, packed = model.weights.num_bytes(), model.weights.num_packed_bytes()
    name = str(dtype).removeprefix("torch.")
    if config.weight_format == "packed" and not packed:
        raise ConfigError(
            f"weight_format packed: {model.path} has no weights of a type that can stay packed"
            " (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K in a GGUF file); leave it out"
        )
    if packed and packed < total:
        name = f"packed ({format_bytes(packed)}) and {name} ({format_bytes(total - packed)})"
        return f"{name} a step"
    return f"{'packed' if packed else name} ({format_bytes(total)} a step)"


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return min(model.max_positions, DEFAULT_CONTEXT)
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {model.max_positions} positions"
            " that the model was made for: lower it"
        )
    tables = table_bytes(model.ropes, model.head_dim, config.max_model_len)
    if tables > (free := _free_memory_bytes()):
        raise ConfigError(
            f"the tables of {config.max_model_len} positions need {format_bytes(tables)} of memory,"
            f" and {format_bytes(free)} are free: lower --max-model-len"
        )
    return config.max_model_len


# ---------------------------------------------------------------- memory


def _kv_bytes(config: EngineConfig, kernels: Kernels) -> int:
    """Memory for KV: what was asked for, or a part of what is free where the kernels compute."""
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    on_gpu = free_gpu_bytes(kernels)
    if on_gpu is not None:
        return int(on_gpu * GPU_MEMORY_SHARE)
    return int(_free_memory_bytes() * MEMORY_SHARE)


def _divide(
    config: EngineConfig, model: ModelConfig, formats: Sequence[str], max_len: int, memory: int
) -> CacheConfig:
    """Blocks per layer group out of ``memory`` bytes. Window groups get what running sequences hold
    at a time and a share for cached windows, never more than ``num_blocks``; full groups the
    rest."""
    groups, size = model.layer_groups, config.block_size
    longest = ceil_div(max_len, size)
    most = config.max_num_seqs * longest + 1
    sizes = [block_bytes(model, group, formats, size) for group in groups]
    per_tail = tail_bytes(model, formats)
    num_tails = min(config.max_num_seqs, config.max_num_batched_tokens) if per_tail else 0
    memory -= num_tails * per_tail
    if memory <= 0:
        raise ConfigError(
            f"the tail slots of {num_tails} sequences need {format_bytes(num_tails * per_tail)}:"
            " give more with --kv-memory, or lower --max-num-seqs"
        )
    num_blocks: dict[str, int] = {}
    for group, one in zip(groups, sizes, strict=True):
        if group.window is not None and len(groups) > 1:
            need = ceil_div(group.window - 1 + config.max_num_batched_tokens, size) + 1
            want = min(int(need * config.max_num_seqs * CACHED_WINDOWS), most) + 1
            want = min(want, config.num_blocks or want)  # a sequence needs no more than full ones
            num_blocks[group.name] = min(want, max(2, int(memory * WINDOW_SHARE) // one))
            memory -= num_blocks[group.name] * one
    for group, one in zip(groups, sizes, strict=True):
        if group.name not in num_blocks:
            share = min(memory // one, most) if config.kv_memory_bytes is None else memory // one
            num_blocks[group.name] = config.num_blocks or share
    if any(count < 2 for count in num_blocks.values()):
        asked = format_bytes(config.kv_memory_bytes or memory)
        raise ConfigError(f"{asked} hold no KV block of this model: give more with --kv-memory")
    return CacheConfig(
        groups=groups,
        num_blocks=tuple(num_blocks[group.name] for group in groups),
        block_size=size,
        prefix_index=config.prefix_index,
        eviction=config.eviction,
        num_tails=num_tails,
        tenant_quota=config.tenant_quota,
        is_fair=config.fair_share == "on",
    )


def _free_memory_bytes() -> int:
    """Memory that the system can give, limits of a container included."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return min(free, _container_bytes() or free)


def _container_bytes() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            text = file.read().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _choices(
    config: EngineConfig,
    weight_format: str,
    kv_format: str,
    cache: CacheConfig,
    storage: KVStorage,
    max_len: int,
) -> tuple[str, ...]:
    lines = [f"weights {weight_format}, KV {kv_format}, context {max_len} tokens"]
    for index, (group, count) in enumerate(zip(cache.groups, cache.num_blocks, strict=True)):
        size = format_bytes(count * storage.block_bytes(index))
        lines.append(
            f"{group.name}: {count} blocks of {cache.block_size} tokens"
            f" ({(count - 1) * cache.block_size} tokens, {size}, {len(group.layers)} layers)"
        )
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    lines.append(
        f"at most {num_seqs} sequences, {config.max_num_batched_tokens} tokens a step,"
        f" {config.max_queue} waiting; prefix index {config.prefix_index},"
        f" eviction {config.eviction}"
    )
    return tuple(lines)
