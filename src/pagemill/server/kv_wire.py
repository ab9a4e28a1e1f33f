"""KV events as bytes: the form of vLLM 0.33 (``vllm/distributed/kv_events.py``), by msgpack.

    batch    {"ts": seconds, "events": [event, ...], "data_parallel_rank": 0}
    event    {"type": "BlockStored", "block_hashes": [h, ...], "parent_block_hash": h or nil,
              "token_ids": [...], "block_size": B, "lora_id": nil, "medium": "GPU",
              "lora_name": nil, "extra_keys": [[...] or nil, ...] (may be left out),
              "group_idx": g, "kv_cache_spec_kind": ..., "kv_cache_spec_sliding_window": w or none}
             {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU", "group_idx": g}
             {"type": "AllBlocksCleared"}

Older versions wrote a batch and its events as arrays, the type first and fields in this order;
``unpack`` takes both. A hash is the integer of the last 8 bytes of the 32, big-endian, as vLLM
writes it unless told otherwise, or all its bytes. Blocks that follow each other are one event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.core.errors import MissingExtraError, PagemillError
from pagemill.core.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from pagemill.core.layers import LayerGroup
from pagemill.core.types import BlockHash, GroupId

MEDIUM = "GPU"
"""What vLLM calls the memory of the device, whatever the device is."""
INT_HASH_BYTES = 8
STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class WireError(PagemillError):
    """Bytes that are no batch of KV events."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one step did to the cache. ``window_groups``: those of its stored blocks."""

    time_s: float
    events: tuple[CacheEvent, ...]
    window_groups: frozenset[GroupId] = frozenset()


def msgpack_library() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MissingExtraError("KV events", "events") from error
    return msgpack


class Packer:
    """Writes batches. ``root`` is that of requests without salt, tenant or adapter: a first block
    under another root carries that root as its extra key, so that equal tokens of two salts differ
    for a reader who keys blocks by their tokens. The salt itself is never written."""

    def __init__(self, groups: Sequence[LayerGroup], root: bytes, *, int_hashes: bool) -> None:
        self._pack = msgpack_library().packb
        self._groups = groups
        self._root = root
        self._int_hashes = int_hashes

    def pack(self, batch: EventBatch) -> bytes:
        events: list[dict[str, Any]] = []
        last: CacheEvent | None = None
        for event in batch.events:
            if isinstance(event, BlockStored):
                if _goes_on(last, event):
                    self._add(events[-1], event)
                else:
                    events.append(self._stored(event))
            elif isinstance(event, BlockRemoved):
                if isinstance(last, BlockRemoved) and last.group == event.group:
                    events[-1]["block_hashes"].append(self._hash(event.block_hash))
                else:
                    events.append(self._removed(event))
            else:
                events.append({"type": "AllBlocksCleared"})
            last = event
        written = {"ts": batch.time_s, "events": events, "data_parallel_rank": 0}
        packed: bytes = self._pack(written)
        return packed

    def _hash(self, block_hash: BlockHash) -> int | bytes:
        if self._int_hashes:
            return int.from_bytes(block_hash[-INT_HASH_BYTES:], "big")
        return block_hash

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        group = self._groups[event.group]
        written: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [self._hash(event.block_hash)],
            "parent_block_hash": None if event.is_first else self._hash(event.parent),
            "token_ids": list(event.token_ids),
            "block_size": len(event.token_ids),
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "group_idx": event.group,
            "kv_cache_spec_kind": "full_attention" if group.window is None else "sliding_window",
        }
        if event.is_first and event.parent != self._root:
            written["extra_keys"] = [[event.parent.hex()]]
        if group.window is not None:
            written["kv_cache_spec_sliding_window"] = group.window
        return written

    def _add(self, written: dict[str, Any], event: BlockStored) -> None:
        written["block_hashes"].append(self._hash(event.block_hash))
        written["token_ids"].extend(event.token_ids)
        if "extra_keys" in written:
            written["extra_keys"].append(None)

    def _removed(self, event: BlockRemoved) -> dict[str, Any]:
        hashes = [self._hash(event.block_hash)]
        written = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
        return {**written, "group_idx": event.group}


def _goes_on(last: CacheEvent | None, event: BlockStored) -> bool:
    if not isinstance(last, BlockStored) or last.group != event.group:
        return False
    return not event.is_first and last.block_hash == event.parent


# ---------------------------------------------------------------- reading


def unpack(payload: bytes) -> EventBatch:
    """A batch as its events, one a block. Raises WireError."""
    try:
        raw = msgpack_library().unpackb(payload, strict_map_key=False)
        if isinstance(raw, Mapping):
            time_s, events = raw["ts"], raw["events"]
        else:
            time_s, events = raw[0], raw[1]
        fields = [_fields(event) for event in events]
        windows = {
            GroupId(f.get("group_idx") or 0)
            for f in fields
            if f.get("kv_cache_spec_sliding_window")
        }
        out = tuple(one for event in fields for one in _events(event))
        return EventBatch(float(time_s), out, frozenset(windows))
    except MissingExtraError:
        raise
    except Exception as error:  # foreign bytes: whatever is wrong with them, they are no batch
        raise WireError(
            f"these bytes are no batch of KV events ({type(error).__name__}: {error}): connect to"
            " an endpoint that speaks vLLM's form"
        ) from error


def _fields(event: Any) -> dict[str, Any]:
    if isinstance(event, Mapping):
        return dict(event)
    kind, *values = event
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(kind, ())
    return {"type": kind, **dict(zip(names, values, strict=False))}


def _events(fields: Mapping[str, Any]) -> list[CacheEvent]:
    kind, group = fields["type"], GroupId(fields.get("group_idx") or 0)
    if kind == "AllBlocksCleared":
        return [CacheCleared()]
    hashes = [_block_hash(value) for value in fields["block_hashes"]]
    if kind == "BlockRemoved":
        return [BlockRemoved(group, block_hash) for block_hash in hashes]
    if kind != "BlockStored":
        raise ValueError(f"there is no event {kind!r}")
    tokens, size = fields["token_ids"], fields["block_size"]
    if len(tokens) != size * len(hashes):
        raise ValueError(f"{len(tokens)} token ids are not {len(hashes)} blocks of {size}")
    before, out = fields["parent_block_hash"], list[CacheEvent]()
    parent = BlockHash(b"") if before is None else _block_hash(before)
    for j, block_hash in enumerate(hashes):
        part = tuple(tokens[j * size : (j + 1) * size])
        out.append(BlockStored(group, block_hash, parent, part, j == 0 and before is None))
        parent = block_hash
    return out


def _block_hash(value: int | bytes) -> BlockHash:
    if isinstance(value, int):
        value = (value & (1 << 64) - 1).to_bytes(INT_HASH_BYTES, "big")
    return BlockHash(bytes(value))
