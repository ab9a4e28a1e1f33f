"""Prometheus metrics: vLLM's suffixes and labels under the prefix ``pagemill`` or ``vllm``.

Names and buckets are those of vLLM's metrics page, so that its dashboards work unchanged with
``--metrics-prefix vllm``. What vLLM does not have keeps the prefix ``pagemill``. Times are seconds;
prefix cache counters count tokens.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pagemill.core.request import Request
from pagemill.core.types import SequenceId
from pagemill.engine.engine import Engine
from pagemill.engine.loop import Step
from pagemill.server.kv_publisher import KvEventPublisher

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNT_BUCKETS = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))  # vLLM's end at its context
LABELS = ("model_name", "engine")
NS = 1e-9
MAX_FIELD_LABELS = 64
OWN_PREFIX = "pagemill"
OWN_NAMES = frozenset(
    (
        "unknown_request_fields",
        "integrity_checks",
        "integrity_failures",
        "estimated_weight_read_bytes",
        "estimated_kv_read_bytes",
        "estimated_flops",
        "kv_event_batches",
        "kv_event_batches_dropped",
        "pins_dropped",
    )
)
"""vLLM has nothing of these names."""


class Metrics:
    """Counts what the engine did. ``on_step`` and ``on_finish`` run in the engine's thread."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = (model_name, "0")
        self._model_name = model_name
        self._last_token_ns: dict[SequenceId, int] = {}
        self._weight_bytes = self._kv_bytes = self._flops = 0
        self._fields: set[str] = set()
        self._make_histograms()
        self.unknown_fields = self._counter(
            "unknown_request_fields", "Request fields that were ignored.", ("field",)
        )
        self.success = self._counter(
            "request_success", "Requests that ended, by reason.", ("finished_reason",)
        )

    def _make_histograms(self) -> None:
        make = self._histogram
        self._ttft = make("time_to_first_token_seconds", TTFT_BUCKETS)
        self._itl = make("inter_token_latency_seconds", TOKEN_BUCKETS)
        self._tpot = make("request_time_per_output_token_seconds", TOKEN_BUCKETS)
        self._e2e = make("e2e_request_latency_seconds", REQUEST_BUCKETS)
        self._queue = make("request_queue_time_seconds", REQUEST_BUCKETS)
        self._inference = make("request_inference_time_seconds", REQUEST_BUCKETS)
        self._prefill = make("request_prefill_time_seconds", REQUEST_BUCKETS)
        self._decode = make("request_decode_time_seconds", REQUEST_BUCKETS)
        self._iteration = make("iteration_tokens_total", STEP_BUCKETS)
        self._prompt_tokens = make("request_prompt_tokens", COUNT_BUCKETS)
        self._output_tokens = make("request_generation_tokens", COUNT_BUCKETS)
        self._computed = make("request_prefill_kv_computed_tokens", COUNT_BUCKETS)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        words = f"Distribution of {name.replace('_', ' ')}."
        metric = Histogram(
            f"{self._prefix}:{name}", words, LABELS, buckets=buckets, registry=self._registry
        )
        return metric.labels(*self._labels)

    def _counter(self, name: str, words: str, labels: tuple[str, ...]) -> Counter:
        return Counter(self._full(name), words, (*LABELS, *labels), registry=self._registry)

    def _full(self, name: str) -> str:
        return f"{OWN_PREFIX if name in OWN_NAMES else self._prefix}:{name}"

    def field_label(self, name: str) -> str:
        """A label for an ignored field: the name, or ``other`` once many different ones came."""
        name = name[:64].encode("utf-8", "replace").decode()
        if name in self._fields or len(self._fields) < MAX_FIELD_LABELS:
            self._fields.add(name)
            return name
        return "other"

    def count(self, counter: Counter, *labels: str) -> None:
        counter.labels(*self._labels, *labels).inc()

    def watch(self, engine: Engine, cache_info: dict[str, str]) -> None:
        """Read gauges and counters from the engine at every scrape."""
        self._registry.register(_EngineCollector(self, engine))
        info = Gauge(
            f"{self._prefix}:cache_config_info",
            "Configuration of the cache, as labels.",
            ("engine", *cache_info),
            registry=self._registry,
        )
        info.labels("0", *cache_info.values()).set(1)

    def watch_events(self, events: KvEventPublisher) -> None:
        """Read the counters of the KV events at every scrape."""
        self._registry.register(_EventCollector(self, events))

    # ------------------------------------------------------------ the engine's thread

    def on_step(self, step: Step) -> None:
        self._iteration.observe(step.plan.num_tokens)
        self._weight_bytes += step.result.weight_bytes
        self._kv_bytes += step.result.kv_bytes
        self._flops += step.result.flops
        for output in step.outputs:
            if output.token_id is not None:
                self._on_token(output.request, step.ended_ns)

    def _on_token(self, request: Request, now_ns: int) -> None:
        last_ns = self._last_token_ns.get(request.sequence_id)
        if last_ns is None:
            self._ttft.observe((now_ns - request.arrival_ns) * NS)
        else:
            self._itl.observe((now_ns - last_ns) * NS)
        if request.finish_reason is None:
            self._last_token_ns[request.sequence_id] = now_ns

    def on_finish(self, request: Request, now_ns: int) -> None:
        self._last_token_ns.pop(request.sequence_id, None)
        reason = request.finish_reason.value if request.finish_reason else "abort"
        self.count(self.success, reason)
        self._e2e.observe((now_ns - request.arrival_ns) * NS)
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._output_tokens.observe(request.num_output_tokens)
        started_ns, first_ns = request.first_scheduled_ns, request.first_token_ns
        if started_ns is None:
            return
        self._queue.observe((started_ns - request.arrival_ns) * NS)
        self._inference.observe((now_ns - started_ns) * NS)
        self._computed.observe(request.num_prompt_tokens - (request.num_cached_tokens or 0))
        if first_ns is None:
            return
        self._prefill.observe((first_ns - started_ns) * NS)
        self._decode.observe((now_ns - first_ns) * NS)
        if request.num_output_tokens > 1:
            gaps = request.num_output_tokens - 1
            self._tpot.observe((now_ns - first_ns) * NS / gaps)

    # ------------------------------------------------------------ scrapes

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._full(name), words, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def counter(self, name: str, words: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._full(name), words, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def totals(self) -> tuple[int, int, int]:
        """(weight bytes, KV bytes, flops) of all steps."""
        return self._weight_bytes, self._kv_bytes, self._flops


class _EngineCollector:
    """Values that the engine keeps anyway, read when somebody asks."""

    def __init__(self, metrics: Metrics, engine: Engine) -> None:
        self._metrics = metrics
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        metrics, scheduler = self._metrics, self._engine.scheduler
        stats, usage = scheduler.stats, self._engine.cache.usage()
        weight_bytes, kv_bytes, flops = metrics.totals()
        gauges = (
            ("num_requests_running", "Requests in the running batch.", scheduler.num_running),
            ("num_requests_waiting", "Requests that wait.", scheduler.num_waiting),
            ("kv_cache_usage_perc", "Held blocks of the fullest group, 0 to 1.", usage),
            ("integrity_failures", "Idle checks that failed.", self._engine.num_integrity_failures),
        )
        counters = (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens admitted.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_output_tokens),
            ("prefix_cache_queries", "Tokens looked up.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Tokens found.", stats.num_hit_tokens),
            ("prompt_tokens_cached", "Prompt tokens served from cache.", stats.num_hit_tokens),
            ("prompt_tokens_recomputed", "Tokens computed again.", stats.num_recomputed_tokens),
            ("pins_dropped", "Blocks over a tenant's pins.", self._engine.cache.num_dropped_pins()),
            ("integrity_checks", "Idle checks made.", self._engine.num_integrity_checks),
            ("estimated_weight_read_bytes", "Weight bytes steps had to read.", weight_bytes),
            ("estimated_kv_read_bytes", "KV bytes steps had to read.", kv_bytes),
            ("estimated_flops", "Floating-point operations of steps.", flops),
        )
        for name, words, value in gauges:
            yield metrics.gauge(name, words, value)
        for name, words, value in counters:
            yield metrics.counter(name, words, value)


class _EventCollector:
    """Counters that the publisher of KV events keeps."""

    def __init__(self, metrics: Metrics, events: KvEventPublisher) -> None:
        self._metrics = metrics
        self._events = events

    def collect(self) -> Iterator[Any]:
        counter = self._metrics.counter
        yield counter("kv_event_batches", "Batches of KV events.", self._events.num_batches)
        words = "Batches that the live stream left out; the replay socket has them."
        yield counter("kv_event_batches_dropped", words, self._events.num_dropped)
