"""Start a server: bind the port first, then load, then serve until SIGTERM drains it.

SIGTERM -> the engine takes nothing new: 503, also /health; the port stays open
        -> what runs ends, or is told at the end of the drain time
        -> the port closes
"""

import errno
import logging
import signal
import socket
from pathlib import Path
from threading import Thread, current_thread, main_thread

import uvicorn

from pagemill.core.clock import SystemClock
from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.core.errors import ConfigError
from pagemill.core.request import Request
from pagemill.engine.build import BuiltEngine, build_engine
from pagemill.engine.loop import Step
from pagemill.models.weights import Progress
from pagemill.server.app import App
from pagemill.server.http_server import HttpProtocol, HttpServer
from pagemill.server.kv_publisher import KvEventPublisher
from pagemill.server.metrics import Metrics

LOG = logging.getLogger("pagemill.server")
BACKLOG = 2048
LAST_WORDS_S = 5
"""Time for answers to reach slow clients after the engine has stopped."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError for a busy port or a host that is not this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        words = f"cannot listen on {host}:{port} ({error.strerror or error}): "
        raise ConfigError(words + _advice(error)) from error
    return listener


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this machine with --host (127.0.0.1; 0.0.0.0 for all of them)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "low ports need more rights; choose one above 1023 with --port"
    return "stop what uses the port, or choose another with --port"


def default_name(model: str) -> str:
    """The name that clients use: a short or hub name as it is, of a path only its last part."""
    path = Path(model).expanduser()
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model


class RunningServer:
    """The parts of one server, wired. ``serve`` returns after a drain."""

    def __init__(
        self, engine_config: EngineConfig, config: ServerConfig, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._listener = bind(config.host, config.port)
        self._clock = SystemClock()
        self._drainer: Thread | None = None
        names = config.served_model_names or (default_name(engine_config.model),)
        self.model_name = names[0]
        self._metrics = Metrics(config.metrics_prefix, names[0])
        self.events: KvEventPublisher | None = None
        try:
            if config.kv_events_endpoint:
                self.events = KvEventPublisher(config)
            self.built: BuiltEngine = build_engine(
                engine_config,
                progress=progress,
                on_step=self._on_step,
                on_finish=self._on_finish,
                on_event=self.events.add if self.events else None,
            )
        except BaseException:
            self._listener.close()
            if self.events is not None:
                self.events.close()
            raise
        self._metrics.watch(self.built.engine, self._cache_info())
        if self.events is not None:
            self._metrics.watch_events(self.events)
            self.events.start(self.built.cache_config.groups, self.built.engine.cache.namespace())
        self.app = App(
            self.built.engine,
            self.built.model.template,
            config,
            self._metrics,
            model_names=names,
            max_model_len=self.built.max_model_len,
        ).asgi()
        settings = uvicorn.Config(
            self.app,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        self._http = HttpServer(settings, self._on_signal)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def _on_step(self, step: Step) -> None:
        self._metrics.on_step(step)
        if self.events is not None:
            self.events.flush()

    def _on_finish(self, request: Request) -> None:
        self._metrics.on_finish(request, self._clock.now_ns())

    def _cache_info(self) -> dict[str, str]:
        cache = self.built.cache_config
        return {
            "block_size": str(cache.block_size),
            "cache_dtype": self.built.kv_format,
            "num_gpu_blocks": str(cache.num_blocks[0]),
            "num_cpu_blocks": "0",
            "enable_prefix_caching": str(cache.prefix_index != "off"),
        }

    def stop(self) -> None:
        """Do what SIGTERM does; ``serve`` returns after the drain."""
        if self._drainer is None:
            self._drainer = Thread(target=self._drain, name="pagemill-drain", daemon=True)
            self._drainer.start()

    def _on_signal(self, number: int) -> None:
        """SIGTERM and the first SIGINT drain; a second SIGINT ends all at once."""
        if self._drainer is not None and number == signal.SIGINT:
            self._http.should_exit = self._http.force_exit = True
        self.stop()

    def _drain(self) -> None:
        """The engine first, the port last: clients are told, not cut off."""
        engine = self.built.engine
        LOG.info("draining for at most %g seconds", self._config.drain_timeout_s)
        try:
            if not engine.drain(self._config.drain_timeout_s):
                LOG.warning("the drain time has ended: what still runs is ended with an error")
            engine.close()
        finally:
            self._http.should_exit = True

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish what runs, within the drain time."""
        if current_thread() is main_thread():  # in other threads signals do not arrive
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: self._on_signal(number))
        self.built.engine.start()
        try:
            self._http.run(sockets=[self._listener])
        finally:
            self.built.engine.close()
            if self._drainer is not None:
                self._drainer.join()
            self._listener.close()
            if self.events is not None:
                self.events.close()
