"""KV events over real ZMQ: the form of the bytes, gaps, replays, late joiners, wrong addresses."""

import sys
import time
from collections.abc import Iterator

import msgpack
import pytest
import zmq

from pagemill.cache.shadow import ShadowIndex
from pagemill.core.config import ServerConfig
from pagemill.core.errors import ConfigError, MissingExtraError
from pagemill.core.events import BlockRemoved, BlockStored, CacheCleared
from pagemill.core.layers import LayerGroup
from pagemill.core.types import BlockHash, GroupId
from pagemill.server.kv_publisher import KvEventPublisher, binds
from pagemill.server.kv_subscriber import KvEventSubscriber
from pagemill.server.kv_wire import EventBatch, Packer, WireError, unpack

GROUPS = (LayerGroup("full", (0,)), LayerGroup("near", (1,), 24))
ROOT = b"r" * 32
LOCAL = "tcp://127.0.0.1:*"


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def stored(
    number: int, parent: int | None = None, group: int = 0, root: bytes = ROOT
) -> BlockStored:
    before = BlockHash(root) if parent is None else name(parent)
    tokens = tuple(range(number * 16, number * 16 + 16))
    return BlockStored(GroupId(group), name(number), before, tokens, parent is None)


def packed(*events: object, int_hashes: bool = True) -> dict[str, object]:
    packer = Packer(GROUPS, ROOT, int_hashes=int_hashes)
    raw = msgpack.unpackb(packer.pack(EventBatch(1.5, events)))  # type: ignore[arg-type]
    assert isinstance(raw, dict)
    return raw


# ---------------------------------------------------------------- the bytes


def test_a_batch_has_vllms_fields() -> None:
    raw = packed(stored(1), stored(2, 1), BlockRemoved(GroupId(0), name(7)), CacheCleared())
    assert raw["ts"] == 1.5 and raw["data_parallel_rank"] == 0
    run, removed, cleared = raw["events"]  # type: ignore[misc]
    assert run == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(16, 48)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    gone = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
    assert removed == gone
    assert cleared == {"type": "AllBlocksCleared"}


def test_hashes_may_be_whole() -> None:
    (run,) = packed(stored(2, 1), int_hashes=False)["events"]  # type: ignore[misc]
    assert run["block_hashes"] == [name(2)] and run["parent_block_hash"] == name(1)


def test_another_root_is_an_extra_key_and_a_window_is_named() -> None:
    salted = stored(1, root=b"s" * 32)
    first, near = packed(salted, stored(2, 1), stored(5, 4, group=1))["events"]  # type: ignore[misc]
    assert first["extra_keys"] == [[(b"s" * 32).hex()], None]
    assert near["kv_cache_spec_kind"] == "sliding_window"
    assert near["kv_cache_spec_sliding_window"] == 24
    assert near["parent_block_hash"] == 4, "named though it was never published"


def test_what_is_packed_is_unpacked() -> None:
    events = (stored(1), stored(2, 1), BlockRemoved(GroupId(1), name(3)), stored(9), CacheCleared())
    got = unpack(Packer(GROUPS, ROOT, int_hashes=False).pack(EventBatch(2.0, events)))
    bare = [event for event in got.events if isinstance(event, BlockStored)]
    assert [event.block_hash for event in bare] == [name(1), name(2), name(9)]
    assert [event.is_first for event in bare] == [True, False, True]
    assert [type(event) for event in got.events] == [type(event) for event in events]


def test_the_arrays_of_older_versions_are_taken() -> None:
    run = ["BlockStored", [b"a" * 32, 5], None, list(range(32)), 16, None, "GPU"]
    old = [3.0, [run, ["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]], 0]
    got = unpack(msgpack.packb(old))
    a, five = BlockHash(b"a" * 32), BlockHash((5).to_bytes(8, "big"))
    assert got.events == (
        BlockStored(GroupId(0), a, BlockHash(b""), tuple(range(16)), True),
        BlockStored(GroupId(0), five, a, tuple(range(16, 32)), False),
        BlockRemoved(GroupId(0), five),
        CacheCleared(),
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb({"ts": 1.0}),
        msgpack.packb([1.0, [["BlockMoved", []]]]),
        msgpack.packb([1.0, [["BlockStored", [1, 2], None, [1, 2, 3], 16]]]),
    ],
)
def test_foreign_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="no batch of KV events"):
        unpack(payload)


# ---------------------------------------------------------------- the shadow


def test_the_shadow_counts_what_cannot_be() -> None:
    shadow = ShadowIndex()
    for event in (
        stored(1),
        stored(2, 1),
        stored(2, 1),
        stored(4, 3),
        BlockRemoved(GroupId(0), name(8)),
    ):
        shadow(event)
    faults = shadow.num_stored_again, shadow.num_unknown_parents, shadow.num_unknown_removed
    assert faults == (1, 1, 1) and shadow.num_faults == 3
    assert shadow.prefix(GroupId(0), name(2)) == tuple(range(16, 48))
    shadow(CacheCleared())
    assert shadow.num_blocks(GroupId(0)) == 0


def test_a_window_group_may_name_an_unpublished_parent() -> None:
    shadow = ShadowIndex(frozenset({GroupId(1)}))
    shadow(stored(5, 4, group=1))
    assert shadow.num_faults == 0
    assert shadow.prefix(GroupId(1), name(5)) == tuple(range(80, 96)), "as far as it is published"


# ---------------------------------------------------------------- sockets


def settings(**changes: object) -> ServerConfig:
    return ServerConfig(
        **{  # type: ignore[arg-type]
            "kv_events_endpoint": LOCAL,
            "kv_events_replay_endpoint": LOCAL,
            "kv_events_topic": "kv",
            **changes,
        }
    )


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(settings(kv_events_buffer_steps=10))
    made.start(GROUPS, ROOT)
    yield made
    made.close()


def subscriber_of(publisher: KvEventPublisher, *, has_replay: bool = True) -> KvEventSubscriber:
    replay = publisher.replay_endpoint if has_replay else None
    return KvEventSubscriber(publisher.endpoint, replay, topic="kv")


def tell(publisher: KvEventPublisher, *numbers: int) -> None:
    """One batch a block, each the child of the one before."""
    for number in numbers:
        publisher.add(stored(number, number - 1 if number > 1 else None))
        publisher.flush()


def joined(publisher: KvEventPublisher, subscriber: KvEventSubscriber) -> None:
    """Returns once the live stream reaches the subscriber, however slow the hand-shake was."""
    for _ in range(500):
        publisher.add(CacheCleared())
        publisher.flush()
        subscriber._is_new = False
        if subscriber._live.poll(20):
            return
    raise AssertionError("the subscriber was never joined")


def test_the_frames_are_topic_number_and_payload(publisher: KvEventPublisher) -> None:
    with subscriber_of(publisher) as one:
        joined(publisher, one)
        topic, number, payload = one._live.recv_multipart()
    assert topic == b"kv" and len(number) == 8
    assert unpack(payload).events == (CacheCleared(),)


def test_a_late_joiner_gets_all_by_replay(publisher: KvEventPublisher) -> None:
    tell(publisher, 1, 2, 3)
    with subscriber_of(publisher) as late:
        assert late.follow(3, 20)
        assert late.num_replayed == 3 and late.is_complete
        assert list(late.shadow.blocks(GroupId(0))) == [name(n)[-8:] for n in (1, 2, 3)]


def test_a_long_replay_loses_nothing() -> None:
    """More batches than ZMQ's own marks of 1,000 would let through to a slow reader."""
    publisher = KvEventPublisher(settings())
    publisher.start(GROUPS, ROOT)
    tell(publisher, *range(1, 6001))
    with subscriber_of(publisher) as late:
        replay = late._replayed(0)
        first, _ = next(replay)
        time.sleep(0.5)  # all of it is on its way while nobody reads
        assert [first, *(number for number, _ in replay)] == list(range(6000))
    publisher.close()


@pytest.mark.parametrize("has_delimiter", [True, False])
def test_the_replay_socket_speaks_to_req_and_dealer(
    publisher: KvEventPublisher, has_delimiter: bool
) -> None:
    tell(publisher, 1, 2, 3)
    empty = (b"",) if has_delimiter else ()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart((*empty, b"no number"))  # answered by nothing
    socket.send_multipart((*empty, (1).to_bytes(8, "big")))
    got = []
    while not got or got[-1][-1]:
        assert socket.poll(20_000)
        got.append(socket.recv_multipart())
    context.destroy(linger=0)
    assert all(frames[: len(empty)] == [*empty] for frames in got)
    numbers = [int.from_bytes(frames[-2], "big", signed=True) for frames in got]
    assert numbers == [1, 2, -1]


def drop(publisher: KvEventPublisher, *numbers: int) -> None:
    """Numbered and kept, but not sent: what a full queue does."""
    publisher._config = settings(kv_events_max_queue=1)
    real = publisher._queue
    publisher._queue = type(real)([None])  # type: ignore[list-item]
    try:
        publisher._wake = lambda: None  # type: ignore[method-assign]
        tell(publisher, *numbers)
    finally:
        publisher._queue = real
        del publisher._wake  # type: ignore[attr-defined]
        publisher._config = settings()


def test_a_gap_is_filled_by_the_replay(publisher: KvEventPublisher) -> None:
    with subscriber_of(publisher) as one:
        joined(publisher, one)
        drop(publisher, 1, 2)
        assert publisher.num_dropped == 2
        tell(publisher, 3)
        assert one.follow(publisher.num_batches, 20)
        assert one.num_replayed >= 2 and one.num_lost == 0 and one.is_complete
        assert one.shadow.num_blocks(GroupId(0)) == 3 and one.shadow.num_faults == 0


def test_a_gap_without_replay_is_told(publisher: KvEventPublisher) -> None:
    with subscriber_of(publisher, has_replay=False) as one:
        joined(publisher, one)
        one.poll(1)
        drop(publisher, 1, 2)
        tell(publisher, 3)
        assert one.follow(publisher.num_batches, 20)
        assert one.num_lost >= 2 and not one.is_complete
        assert one.shadow.num_unknown_parents == 1
        publisher.add(CacheCleared())
        publisher.flush()
        assert one.follow(publisher.num_batches, 20)
        assert one.is_complete, "nothing is cached, and that is known"


def test_a_gap_older_than_the_buffer_is_told(publisher: KvEventPublisher) -> None:
    tell(publisher, *range(1, 21))
    with subscriber_of(publisher) as late:
        assert late.follow(20, 20)
        assert (late.num_replayed, late.num_lost, late.is_complete) == (10, 10, False)


def test_a_new_publisher_is_noticed() -> None:
    first = KvEventPublisher(settings())
    first.start(GROUPS, ROOT)
    endpoint, replay = first.endpoint, first.replay_endpoint
    with KvEventSubscriber(endpoint, replay, topic="kv") as one:
        joined(first, one)
        tell(first, 1)
        assert one.follow(first.num_batches, 20)
        first.close()
        second = KvEventPublisher(
            settings(kv_events_endpoint=f"@{endpoint}", kv_events_replay_endpoint=f"@{replay}")
        )
        second.start(GROUPS, ROOT)
        for number in range(1, 500):
            tell(second, number)
            one.poll(0.05)
            if one.num_restarts:
                break
        assert one.num_restarts == 1
        assert one.follow(second.num_batches, 20)
        assert one.shadow.num_blocks(GroupId(0)) == number and one.shadow.num_faults == 0
        second.close()


def test_events_without_a_step_are_told_too(publisher: KvEventPublisher) -> None:
    """A cache that is cleared while nothing runs."""
    tell(publisher, 1, 2)
    publisher.add(CacheCleared())
    with subscriber_of(publisher) as one:
        for _ in range(100):
            one.poll(0.1)
            one.catch_up()
            if one.num_applied == 3:
                break
        assert one.num_applied == 3 and one.shadow.num_blocks(GroupId(0)) == 0


def test_close_sends_what_is_left() -> None:
    publisher = KvEventPublisher(settings())
    publisher.start(GROUPS, ROOT)
    with subscriber_of(publisher) as one:
        joined(publisher, one)
        publisher.add(stored(1))
        publisher.close()
        publisher.close()
        assert one.follow(publisher.num_batches, 20)
        assert one.shadow.num_blocks(GroupId(0)) == 1


# ---------------------------------------------------------------- settings


def test_addresses_bind_as_vllms_do() -> None:
    assert all(binds(a) for a in ("tcp://*:5557", "tcp://[::]:1", "ipc:///tmp/x", "@tcp://h:1"))
    assert not binds("tcp://10.0.0.1:5557")


@pytest.mark.parametrize("address", ["tcp://*:999999", "nonsense*", "@tcp://127.0.0.1:1:2"])
def test_a_wrong_address_names_the_option(address: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-endpoint"):
        KvEventPublisher(settings(kv_events_endpoint=address))


def test_a_busy_replay_address_names_the_option(publisher: KvEventPublisher) -> None:
    busy = "@" + publisher.replay_endpoint
    with pytest.raises(ConfigError, match="--kv-events-replay-endpoint"):
        KvEventPublisher(settings(kv_events_replay_endpoint=busy))


@pytest.mark.parametrize("module", ["zmq", "msgpack"])
def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[events\]'"):
        KvEventPublisher(settings())
