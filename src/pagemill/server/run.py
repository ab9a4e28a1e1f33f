"""Start a server: bind the port first, then load, then serve until SIGTERM drains it."""

import logging
import math
import signal
import socket
from pathlib import Path
from threading import current_thread, main_thread

import uvicorn

from pagemill.core.clock import SystemClock
from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.core.errors import ConfigError
from pagemill.core.request import Request
from pagemill.engine.build import BuiltEngine, build_engine
from pagemill.models.weights import Progress
from pagemill.server.app import App
from pagemill.server.metrics import Metrics

BACKLOG = 2048


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
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}):"
            " stop what uses the port, or choose another with --port"
        ) from error
    return listener


def default_name(model: str) -> str:
    """The name that clients use: a short or hub name as it is, of a path only its last part."""
    path = Path(model).expanduser()
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model


def _outlive_signals() -> None:
    """uvicorn raises SIGTERM and SIGINT again once it has shut down; by then the engine still has
    to drain, so the process must survive them. In other threads signals do not arrive."""
    if current_thread() is main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)


class RunningServer:
    """The parts of one server, wired. ``serve`` returns after a drain."""

    def __init__(
        self, engine_config: EngineConfig, config: ServerConfig, progress: Progress | None = None
    ) -> None:
        self._config = config
        self._listener = bind(config.host, config.port)
        self._clock = SystemClock()
        self._uvicorn: uvicorn.Server | None = None
        names = config.served_model_names or (default_name(engine_config.model),)
        self.model_name = names[0]
        self._metrics = Metrics(config.metrics_prefix, names[0])
        try:
            self.built: BuiltEngine = build_engine(
                engine_config,
                progress=progress,
                on_step=self._metrics.on_step,
                on_finish=self._on_finish,
            )
        except BaseException:
            self._listener.close()
            raise
        self._metrics.watch(self.built.engine, self._cache_info())
        self.app = App(
            self.built.engine,
            self.built.model.template,
            config,
            self._metrics,
            model_names=names,
            max_model_len=self.built.max_model_len,
        ).asgi()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

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
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish what runs, within the drain time."""
        settings = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(self._config.drain_timeout_s),
        )
        self.built.engine.start()
        _outlive_signals()
        self._uvicorn = uvicorn.Server(settings)
        try:
            self._uvicorn.run(sockets=[self._listener])
        finally:
            logging.getLogger("pagemill.server").info("draining")
            self.built.engine.drain(self._config.drain_timeout_s)
            self.built.engine.close()
            self._listener.close()
