"""``--kv-events-config``: vLLM's JSON for the settings of KV events, where they mean the same."""

import json
from typing import Any

NAMES = {
    "endpoint": "kv_events_endpoint",
    "replay_endpoint": "kv_events_replay_endpoint",
    "topic": "kv_events_topic",
    "buffer_steps": "kv_events_buffer_steps",
    "hwm": "kv_events_hwm",
    "max_queue_size": "kv_events_max_queue",
}
KV_EVENTS_SIZES = ("kv_events_hwm", "kv_events_max_queue")
"""Settings that only the JSON has."""
DEFAULT_ENDPOINT = "tcp://*:5557"


def read_kv_events_config(text: str) -> dict[str, Any]:
    """Fields of ServerConfig. Raises ValueError for text that vLLM would not take either."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error}); give vLLM's, as {_EXAMPLE}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"is no JSON object; give vLLM's, as {_EXAMPLE}")
    is_on = raw.pop("enable_kv_cache_events", False)
    publisher = raw.pop("publisher", None) or ("zmq" if is_on else "null")
    if publisher not in ("zmq", "null"):
        raise ValueError(f"publisher {publisher!r} is not known: give zmq or null")
    out: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in NAMES:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(NAMES)}")
        kind = str if name in ("endpoint", "replay_endpoint", "topic") else int
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}: it must be {_WORDS[kind]}")
        if value is not None:
            out[NAMES[name]] = value
    if not is_on or publisher == "null":
        return {}
    return {"kv_events_endpoint": DEFAULT_ENDPOINT, **out}


_EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
_WORDS: dict[type, str] = {str: "text", int: "a whole number"}
