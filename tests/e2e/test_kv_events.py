"""A real server, real requests, real ZMQ: the index rebuilt from events is the server's index."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from model.live_server import LiveServer
from pagemill.core.types import BlockHash, GroupId
from pagemill.server.kv_publisher import KvEventPublisher
from pagemill.server.kv_subscriber import KvEventSubscriber

LOCAL = "tcp://127.0.0.1:*"
GROUP = GroupId(0)
B = 16


@pytest.fixture(scope="module", params=["radix", "flat"])
def server(
    request: pytest.FixtureRequest, smollm2: Path, start_server: Callable[..., LiveServer]
) -> LiveServer:
    """A pool so small that the traffic evicts."""
    return start_server(
        smollm2,
        num_blocks=60,
        prefix_index=request.param,
        kv_events_endpoint=LOCAL,
        kv_events_replay_endpoint=LOCAL,
        operator_key="boss",
    )


def publisher_of(server: LiveServer) -> KvEventPublisher:
    assert server.running.events is not None
    return server.running.events


def subscriber_of(server: LiveServer) -> KvEventSubscriber:
    publisher = publisher_of(server)
    return KvEventSubscriber(publisher.endpoint, publisher.replay_endpoint)


def send(server: LiveServer, stream: random.Random, count: int) -> None:
    """Prompts with shared beginnings, some under a salt."""
    for _ in range(count):
        shared = [stream.randrange(3) + 500] * stream.choice((20, 60, 100))
        own = [stream.randrange(1000, 9000) for _ in range(stream.choice((3, 30, 90)))]
        body: dict[str, Any] = {"prompt": shared + own, "max_tokens": 4, "temperature": 0}
        if stream.random() < 0.3:
            body["cache_salt"] = "s"
        assert server.post("/v1/completions", body).status_code == 200
    server.wait_idle()


def check_same(server: LiveServer, subscriber: KvEventSubscriber) -> int:
    """Every block of the shadow is found in the cache by its tokens and has the same hash, and
    there are as many: the two sets are equal. Gives their size."""
    publisher = publisher_of(server)
    publisher.flush()  # the engine is idle
    assert subscriber.follow(publisher.num_batches, 30)
    subscriber.catch_up()
    shadow, cache = subscriber.shadow, server.engine.cache
    assert subscriber.is_complete and shadow.num_faults == 0
    roots = [cache.namespace(), cache.namespace(salt="s")]
    for block_hash in shadow.blocks(GROUP):
        prefix = array("I", shadow.prefix(GROUP, block_hash))
        matches = [cache.peek_match(prefix + array("I", [1]), root) for root in roots]
        assert any(
            match.num_tokens >= len(prefix) and found(match.key, block_hash) for match in matches
        )
    assert shadow.num_blocks(GROUP) == cache.stats().groups[0].num_published
    return shadow.num_blocks(GROUP)


def found(key: BlockHash, told: BlockHash) -> bool:
    return key[-8:] == told


def test_the_shadow_is_the_index(server: LiveServer) -> None:
    stream = random.Random(7)
    with subscriber_of(server) as early:
        early.poll(0.2)
        send(server, stream, 24)
        assert check_same(server, early) > 20
        assert server.engine.cache.stats().groups[0].num_evicted > 0
        early._live.setsockopt(zmq.UNSUBSCRIBE, b"")  # the network loses what comes now
        send(server, stream, 6)
        assert early.poll(0.2) == []
        early._live.setsockopt(zmq.SUBSCRIBE, b"")
        for _ in range(100):
            send(server, stream, 1)
            if early.poll(0.2):
                break
        assert early.num_replayed >= 6, "the gap was filled"
        assert check_same(server, early) > 20
        with subscriber_of(server) as late:
            check_same(server, late)
            assert late.num_replayed == publisher_of(server).num_batches
            assert dict(late.shadow.blocks(GROUP)) == dict(early.shadow.blocks(GROUP))


def test_a_missed_event_is_seen_by_the_comparison(server: LiveServer) -> None:
    """Negative control."""
    send(server, random.Random(1), 8)
    with subscriber_of(server) as one:
        check_same(server, one)
        blocks = dict(one.shadow.blocks(GROUP))
        lost = next(reversed(blocks))
        one.shadow._groups[GROUP].pop(lost)
        with pytest.raises(AssertionError):
            check_same(server, one)


def test_the_batches_are_counted(server: LiveServer) -> None:
    send(server, random.Random(2), 1)
    assert server.metric("kv_event_batches") == publisher_of(server).num_batches > 0
    assert server.metric("kv_event_batches_dropped") == 0


def test_a_cache_that_is_cleared_at_idle_is_told(server: LiveServer) -> None:
    """No step follows; the shadow is empty all the same."""
    send(server, random.Random(3), 8)
    with subscriber_of(server) as one:
        assert check_same(server, one) > 20
        key = {"Authorization": "Bearer boss"}
        answer = server.http.request("DELETE", "/v1/cache", headers=key, json={})
        assert answer.status_code == 200
        assert check_same(server, one) == 0
