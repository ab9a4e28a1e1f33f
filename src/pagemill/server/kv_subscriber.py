"""The other end of the KV events: follows a publisher and keeps a shadow of its index."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from pagemill.cache.shadow import ShadowIndex
from pagemill.core.errors import ConfigError
from pagemill.core.events import CacheCleared
from pagemill.server.kv_publisher import END_OF_REPLAY, zmq_library
from pagemill.server.kv_wire import EventBatch, unpack


class KvEventSubscriber:
    """Follows one publisher of KV events, of pagemill or of vLLM.

        live stream    ... 7  8  .  .  11  12 ...
        expected                 9: asked of the replay socket before 11 is taken

    1. Batches are applied once each, in the order of their numbers.
    2. ``is_complete``: every batch since the publisher's first, or since it was last cleared, has
       been applied; then ``shadow`` is its index. Without the replay socket, or when a gap is older
       than what the publisher keeps, it turns false, and ``num_lost`` counts.
    3. Numbers say nothing of who counts. A number that was seen live before means a new publisher;
       after a lost connection, and at a gap, the replay is asked for the last applied batch too,
       and other bytes mean the same. Then the shadow starts again.

    One thread at a time. ``poll`` does everything.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_timeout_s: float = 5.0,
    ) -> None:
        self._zmq = zmq_library()
        self._replay_timeout_s = replay_timeout_s
        self.shadow = ShadowIndex()
        self.is_complete = True
        self.num_lost = self.num_replayed = self.num_restarts = 0
        self._expected = 0
        self._last_live = -1
        self._last_payload = b""
        self._may_be_new = False
        self._topic = topic.encode()
        self._context = self._zmq.Context()
        try:
            self._live = self._context.socket(self._zmq.SUB)
            self._live.setsockopt(self._zmq.SUBSCRIBE, self._topic)
            self._monitor = self._live.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
            self._live.connect(endpoint)
            self._replay_endpoint = replay_endpoint
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot follow KV events at {endpoint}: {error}; give an address such as"
                " tcp://127.0.0.1:5557"
            ) from error
        self._is_new = True

    def close(self) -> None:
        self._live.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_applied(self) -> int:
        """The number of the next batch that is wanted: all before it are applied or lost."""
        return self._expected

    def poll(self, timeout_s: float = 0.0) -> list[EventBatch]:
        """Apply what has come, waiting at most ``timeout_s`` for the first; gives what it applied.
        At the first call what the publisher still keeps is asked for."""
        applied: list[EventBatch] = []
        if self._is_new:
            self._is_new = False
            applied += self._catch_up()
        wait_ms = 0 if applied else int(timeout_s * 1000)
        while self._live.poll(wait_ms):
            wait_ms = 0
            self._see_disconnects()
            _, number, payload = self._live.recv_multipart()
            applied += self._take_live(int.from_bytes(number, "big"), payload)
        return applied

    def follow(self, num_batches: int, timeout_s: float) -> bool:
        """Poll until ``num_batches`` are applied or lost. False when time ran out."""
        deadline = time.monotonic() + timeout_s
        while self._expected < num_batches and time.monotonic() < deadline:
            self.poll(0.1)
        return self._expected >= num_batches

    def catch_up(self) -> list[EventBatch]:
        """Ask the replay socket for everything after the last batch, though no gap was seen."""
        self._is_new = False
        return self._catch_up()

    def _see_disconnects(self) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._may_be_new = True

    def _take_live(self, number: int, payload: bytes) -> list[EventBatch]:
        if number <= self._last_live:
            self._restart()
        self._last_live = number
        if number < self._expected:
            return []  # the replay had it already
        applied: list[EventBatch] = []
        if number > self._expected or self._may_be_new:
            applied += self._catch_up(number)
        if number >= self._expected:
            applied += self._apply(number, payload)
        return applied

    def _restart(self) -> None:
        self.num_restarts += 1
        self.shadow.clear()
        self._expected = 0
        self._may_be_new = False
        self.is_complete = True

    def _apply(self, number: int, payload: bytes) -> list[EventBatch]:
        if number > self._expected:
            self.num_lost += number - self._expected
            self.is_complete = False
        batch = unpack(payload)
        self.shadow.window_groups |= batch.window_groups
        for event in batch.events:
            self.shadow(event)
            self.is_complete |= isinstance(event, CacheCleared)
        self._expected = number + 1
        self._last_payload = payload
        return [batch]

    def _catch_up(self, before: int | None = None) -> list[EventBatch]:
        """Apply what the replay has from the expected batch on, up to ``before``."""
        applied: list[EventBatch] = []
        wanted, is_same = self._expected, False
        for number, payload in self._replayed(max(0, wanted - 1)):
            if number == wanted - 1 and payload != self._last_payload:
                self._restart()
                return self._catch_up(before)
            is_same |= number == wanted - 1
            if number >= self._expected and (before is None or number < before):
                applied += self._apply(number, payload)
                self.num_replayed += 1
        if self._may_be_new and not is_same:
            self.is_complete = False  # nobody can say whether it is the same publisher
        self._may_be_new = False
        return applied

    def _replayed(self, start: int) -> Iterator[tuple[int, bytes]]:
        if not self._replay_endpoint:
            return
        socket = self._context.socket(self._zmq.DEALER)
        socket.set_hwm(0)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            deadline = time.monotonic() + self._replay_timeout_s
            while (left_s := deadline - time.monotonic()) > 0:
                if not socket.poll(int(left_s * 1000) + 1):
                    return
                *_, number, payload = socket.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                yield int.from_bytes(number, "big"), payload
        finally:
            socket.close(linger=0)
