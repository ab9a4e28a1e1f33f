"""A whole server in this process: real HTTP on a free port, and its engine within reach."""

import time
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from openai import OpenAI

from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.server.run import RunningServer

SERVER_FIELDS = {field.name for field in fields(ServerConfig)}


class LiveServer:
    """``settings`` are fields of EngineConfig and ServerConfig. float32 unless said otherwise."""

    def __init__(self, model: Path, key_file: Path, **settings: Any) -> None:
        server = {k: v for k, v in settings.items() if k in SERVER_FIELDS}
        engine = {k: v for k, v in settings.items() if k not in SERVER_FIELDS}
        engine = {"dtype": "float32", "num_blocks": 2000, "cache_key_file": key_file, **engine}
        self.running = RunningServer(
            EngineConfig(model=str(model), **engine),
            ServerConfig(port=0, served_model_names=("tested",), **server),
        )
        self.engine = self.running.built.engine
        self.url = f"http://127.0.0.1:{self.running.port}"
        self.thread = Thread(target=self.running.serve, daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.wait_until_up()

    def wait_until_up(self) -> None:
        for _ in range(200):
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError("the server did not come up")

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=120)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str, prefix: str = "pagemill") -> float:
        """The sum of a metric over its labels."""
        text = self.http.get("/metrics").text
        full = f"{prefix}:{name}"
        rows = [
            line
            for line in text.splitlines()
            if line.startswith((full + "{", full + "_total{", full + " "))
        ]
        assert rows, f"there is no metric {full}"
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def wait_idle(self) -> None:
        """Until nothing runs; then no block is held and the integrity check has passed."""
        for _ in range(1000):
            scheduler = self.engine.scheduler
            if not scheduler.has_work and not self.engine.has_requests:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the server is still busy")
        assert self.num_held_blocks() == 0
        self.engine.scheduler.check_integrity()
        assert self.engine.num_integrity_failures == 0

    def num_held_blocks(self) -> int:
        return sum(group.num_held for group in self.engine.cache.stats().groups)

    def stop(self) -> None:
        """Stop as SIGTERM does. Everything must be back before."""
        self.wait_idle()
        self.running.stop()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        self.http.close()
