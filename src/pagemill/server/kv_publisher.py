"""Tells others what the cache holds: a ZMQ PUB socket and a replay socket, as vLLM has them.

PUB      topic, sequence number (8 bytes, big-endian), payload
ROUTER   asked with a sequence number: all kept batches from it on, as (number, payload), then
         (-1, empty)
"""

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

from pagemill.core.config import ServerConfig
from pagemill.core.errors import ConfigError, MissingExtraError
from pagemill.core.events import CacheEvent
from pagemill.core.layers import LayerGroup
from pagemill.server.kv_wire import EventBatch, Packer, msgpack_library

LOG = logging.getLogger("pagemill.events")
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LAST_BATCHES_MS = 1000
MAX_PORT = 65535
LONE_EVENTS_MS = 100
"""Events that no step follows, as those of a cache that is cleared at idle, wait so long."""


def zmq_library() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise MissingExtraError("KV events", "events") from error
    return zmq


@dataclass(slots=True)
class _Kept:
    """A numbered batch; its bytes once somebody needed them."""

    number: int
    batch: EventBatch | None
    payload: bytes = b""


class KvEventPublisher:
    """Publishes the events of one cache from a thread of its own.

        made (sockets are bound) --start--> running --close--> closed

    1. ``add`` and ``flush`` are for the engine's thread and never wait: they append to queues. A
       lock is held for an append, and while the replay socket copies the list of what is kept.
    2. Each batch gets the next number, also one that is not sent: a full queue drops it from the
       live stream only. ``num_dropped`` counts it, a subscriber sees the gap, and the replay socket
       still has it, among the last ``kv_events_buffer_steps`` batches.
    3. Batches go out in the order of their numbers.
    """

    def __init__(self, config: ServerConfig, *, int_hashes: bool = True) -> None:
        self._zmq = zmq_library()
        msgpack_library()
        self._config = config
        self._int_hashes = int_hashes
        self._pending: list[CacheEvent] = []
        self._lock = Lock()
        self._kept: deque[_Kept] = deque(maxlen=config.kv_events_buffer_steps)
        self._queue: deque[_Kept] = deque()
        self._next_number = 0
        self.num_dropped = 0
        self._is_closing = False
        self._packer: Packer | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context = self._zmq.Context()
        try:
            self._pub = self._publisher_socket()
            self._replay = self._replay_socket()
        except BaseException:
            self._release()
            raise
        self._thread = Thread(target=self._run, name="pagemill-events", daemon=True)

    # ------------------------------------------------------------ sockets

    def _publisher_socket(self) -> Any:
        socket = self._context.socket(self._zmq.PUB)
        socket.set_hwm(self._config.kv_events_hwm)
        address = self._config.kv_events_endpoint
        if binds(address):
            self._bind(socket, address.removeprefix("@"), "kv-events-endpoint")
        else:
            try:
                socket.connect(address)
            except self._zmq.ZMQError as error:
                raise _bad_address("kv-events-endpoint", address, error) from error
        return socket

    def _replay_socket(self) -> Any:
        address = self._config.kv_events_replay_endpoint
        if not address:
            return None
        socket = self._context.socket(self._zmq.ROUTER)
        # a whole replay fits; over its mark (1,000 by default) a ROUTER drops without a word
        socket.set_hwm(self._config.kv_events_buffer_steps + 1)
        self._bind(socket, address.removeprefix("@"), "kv-events-replay-endpoint")
        return socket

    def _bind(self, socket: Any, address: str, option: str) -> None:
        port = address.rpartition(":")[2]
        try:
            if port.isdigit() and int(port) > MAX_PORT:  # ZMQ would take its last 16 bits
                raise self._zmq.ZMQError(errno.EINVAL)
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise _bad_address(option, address, error) from error

    @property
    def endpoint(self) -> str:
        """The address that subscribers connect to, its port filled in."""
        last: bytes = self._pub.getsockopt(self._zmq.LAST_ENDPOINT)
        return last.rstrip(b"\0").decode()

    @property
    def replay_endpoint(self) -> str:
        if self._replay is None:
            return ""
        last: bytes = self._replay.getsockopt(self._zmq.LAST_ENDPOINT)
        return last.rstrip(b"\0").decode()

    @property
    def num_batches(self) -> int:
        """Batches numbered so far, those dropped from the live stream included."""
        return self._next_number

    # ------------------------------------------------------------ the engine's thread

    def add(self, event: CacheEvent) -> None:
        """One more event of the step that runs."""
        with self._lock:
            self._pending.append(event)

    def flush(self) -> None:
        """The step is over: what it did is one batch."""
        with self._lock:
            if not self._pending:
                return
            batch = EventBatch(time.time(), tuple(self._pending))
            self._pending.clear()
            kept = _Kept(self._next_number, batch)
            self._next_number += 1
            self._kept.append(kept)
            if len(self._queue) < self._config.kv_events_max_queue:
                self._queue.append(kept)
            else:
                self.num_dropped += 1
        self._wake()

    # ------------------------------------------------------------ any thread

    def start(self, groups: Sequence[LayerGroup], root: bytes) -> None:
        """Begin to send. ``root`` is the cache's namespace of requests without salt or tenant."""
        self._packer = Packer(groups, root, int_hashes=self._int_hashes)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued and close the sockets. Call it when the engine has stopped."""
        if self._is_closing:
            return
        if self._packer is not None:
            self.flush()
        self._is_closing = True
        self._wake()
        if self._packer is not None:
            self._thread.join()
        self._release()

    def _release(self) -> None:
        self._context.destroy(linger=LAST_BATCHES_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            pass  # it is full of calls already

    # ------------------------------------------------------------ the publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_read, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while True:
            if not poller.poll(LONE_EVENTS_MS):
                self.flush()
            self._quiet()
            self._send_queued()
            if self._replay is not None:
                self._answer_replays()
            if self._is_closing and not self._queue:
                return

    def _quiet(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _send_queued(self) -> None:
        topic = self._config.kv_events_topic.encode()
        while self._queue:
            kept = self._queue.popleft()
            payload = self._payload(kept)
            self._pub.send_multipart((topic, kept.number.to_bytes(8, "big"), payload))

    def _payload(self, kept: _Kept) -> bytes:
        if kept.batch is not None:
            assert self._packer is not None
            kept.payload, kept.batch = self._packer.pack(kept.batch), None
        return kept.payload

    def _answer_replays(self) -> None:
        while self._replay.poll(0):
            *envelope, asked = self._replay.recv_multipart()
            if len(asked) != 8 or not envelope:
                LOG.warning("a replay request of %d bytes is no sequence number", len(asked))
                continue
            start = int.from_bytes(asked, "big")
            with self._lock:
                wanted = [kept for kept in self._kept if kept.number >= start]
            for kept in wanted:
                number = kept.number.to_bytes(8, "big")
                self._replay.send_multipart((*envelope, number, self._payload(kept)))
            self._replay.send_multipart((*envelope, END_OF_REPLAY, b""))


def binds(address: str) -> bool:
    """As vLLM decides: ``*``, ``::``, ipc and inproc bind, other addresses are connected to. A
    leading ``@`` always binds (the notation of CZMQ), so that one interface can be named."""
    local = address.startswith(("@", "ipc://", "inproc://"))
    return local or "*" in address or "::" in address


def _bad_address(option: str, address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--{option} {address}: {error}; give a free address such as tcp://*:5557, or"
        " @tcp://127.0.0.1:5557 for this machine only"
    )
