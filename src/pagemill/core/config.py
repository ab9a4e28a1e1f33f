"""Settings of an engine and a server, as frozen values that check themselves."""

from dataclasses import dataclass
from pathlib import Path

from pagemill.core.errors import ConfigError
from pagemill.core.layers import BLOCK_SIZES, EVICTIONS, PREFIX_INDEXES
from pagemill.core.retention import MAX_BAND
from pagemill.core.units import MAX_BYTES

DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_FORMATS = ("auto", "packed", "bf16")
KV_FORMATS = ("auto", "fp32", "bf16", "i8", "f8", "k8v4", "i4c")
DEVICES = ("cpu", "cuda", "auto")
POLICIES = ("fcfs", "priority")
MAX_DRAIN_S = 86_400.0
MAX_COUNT = (1 << 31) - 1
MAX_THREADS = 4096


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def _between(name: str, value: int | None, low: int, high: int = MAX_COUNT) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} is {value}: it must be at least {low}")
    if value is not None and value > high:
        raise ConfigError(f"{name} is too large: it must be at most {high}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine runs and with how much memory. None leaves a choice to pagemill.

    ``num_blocks`` counts blocks of full layer groups; ``kv_memory_bytes`` is the alternative.
    """

    model: str
    device: str = "cpu"
    """auto: cuda where there is a device and Triton, else cpu."""
    dtype: str = "auto"
    weight_format: str = "auto"
    """packed: matrices stay as a GGUF file has them; auto: so where they can and dtype is bfloat16.
    """
    kv_format: str = "auto"
    kv_skip_layers: tuple[str, ...] = ()
    """Layers that stay in bf16: numbers, ranges as 0-2, or ``window``."""
    kv_format_force: str = "off"
    """on: keep the format even where the first prompt shows that it does not suit the model."""
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    scheduling_policy: str = "fcfs"
    prefix_index: str = "radix"
    eviction: str = "reuse_rank"
    tenant_quota: float = 1.0
    fair_share: str = "off"
    cache_key_file: Path | None = None
    chat_template: Path | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("name a model: a folder, a GGUF file, or a short name (smollm2-135m)")
        _choose("device", self.device, DEVICES)
        _choose("dtype", self.dtype, DTYPES)
        _choose("weight_format", self.weight_format, WEIGHT_FORMATS)
        if self.dtype == "float32" and self.weight_format != "auto":
            raise ConfigError(
                f"weight_format {self.weight_format} and dtype float32 exclude each other: float32"
                " computes with what the file decodes to; leave one of them out"
            )
        _choose("kv_format", self.kv_format, KV_FORMATS)
        _choose("kv_format_force", self.kv_format_force, ("on", "off"))
        _choose("prefix_index", self.prefix_index, PREFIX_INDEXES)
        _choose("eviction", self.eviction, EVICTIONS)
        _choose("scheduling_policy", self.scheduling_policy, POLICIES)
        _choose("fair_share", self.fair_share, ("on", "off"))
        if not 0 < self.tenant_quota <= 1:
            raise ConfigError(f"tenant_quota is {self.tenant_quota}: give a part, as 0.5")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}: choose one of {BLOCK_SIZES}")
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError("give num_blocks or kv_memory, not both")
        _between("num_blocks", self.num_blocks, 2)
        _between("kv_memory", self.kv_memory_bytes, 1, MAX_BYTES)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_queue"):
            _between(name, getattr(self, name), 1)
        _between("--threads", self.num_threads, 1, MAX_THREADS)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and as what a server answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    operator_key: str | None = None
    max_cache_priority: int = MAX_BAND
    """The highest ``cache_priority`` that a request may ask for."""
    metrics_prefix: str = "pagemill"
    drain_timeout_s: float = 30.0
    kv_events_endpoint: str = ""
    """Where KV events are published (ZMQ); empty: they are not."""
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    kv_events_buffer_steps: int = 10_000
    """Batches that the replay socket keeps."""
    kv_events_hwm: int = 100_000
    """Batches that ZMQ queues for a slow subscriber before it drops."""
    kv_events_max_queue: int = 100_000
    """Batches that may wait for the publisher's thread; more are left to the replay socket."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must lie between 0 and 65535")
        _choose("metrics_prefix", self.metrics_prefix, ("pagemill", "vllm"))
        if not 0.0 <= self.drain_timeout_s <= MAX_DRAIN_S:  # also refuses NaN
            raise ConfigError(
                f"drain_timeout is {self.drain_timeout_s}: give 0 to {MAX_DRAIN_S:.0f} seconds"
            )
        if self.operator_key is not None and self.operator_key in ("", *self.api_keys):
            raise ConfigError("operator_key: give a key that is no api_key, and not empty")
        _between("max_cache_priority", self.max_cache_priority, 0, MAX_BAND)
        if any(not key for key in self.api_keys):
            raise ConfigError("an api_key is empty: leave it out to serve without a key")
        self._check_events()

    def _check_events(self) -> None:
        for name in ("kv_events_buffer_steps", "kv_events_hwm", "kv_events_max_queue"):
            _between(name, getattr(self, name), 1)
