"""How long a request's prefix should stay cached, from the fields that clients send.

    cache_priority           0 to 100, higher is kept longer (35)
    cache_ttl                seconds, started again by every hit
    cache_pin                true: goes last of all, within the tenant's budget
    prompt_cache_retention   OpenAI's: "in_memory" is 10 minutes, "24h" a day
    cache_control            Anthropic's: {"type": "ephemeral", "ttl": "5m" or "1h"}, at the top or
                             on a message or a part of one; it counts for the whole prompt

Of several lifetimes the longest counts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pagemill.core.errors import RequestError
from pagemill.core.retention import DEFAULT_BAND, MAX_BAND, Retention
from pagemill.server.protocol import ChatBody, Sampled

NS_PER_S = 1_000_000_000
RETENTIONS: Mapping[str, float] = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}
CONTROL_TTLS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
MAX_TTL_S = 7 * 86_400.0


def retention_of(body: Sampled, max_band: int = MAX_BAND) -> Retention:
    """``max_band``: the highest ``cache_priority`` that this server takes from a client. Raises
    RequestError that names the field."""
    asked = body.cache_priority
    if asked is not None and not 0 <= asked <= max_band:
        raise RequestError(f"cache_priority is {asked}: give 0 to {max_band}", "cache_priority")
    band = min(DEFAULT_BAND, max_band) if asked is None else asked
    ttls = list(_lifetimes(body))
    ttl_ns = round(max(ttls) * NS_PER_S) if ttls else None
    return Retention(band, ttl_ns, bool(body.cache_pin))


def _lifetimes(body: Sampled) -> Iterator[float]:
    if body.cache_ttl is not None:
        if not 0.001 <= body.cache_ttl <= MAX_TTL_S:
            raise RequestError(
                f"cache_ttl is {body.cache_ttl}: give seconds up to {MAX_TTL_S:.0f}", "cache_ttl"
            )
        yield body.cache_ttl
    if body.prompt_cache_retention is not None:
        known = RETENTIONS.get(body.prompt_cache_retention)
        if known is None:
            raise RequestError(
                f"prompt_cache_retention is {body.prompt_cache_retention!r}: give in_memory or 24h",
                "prompt_cache_retention",
            )
        yield known
    for control in _controls(body):
        yield _control_ttl(control)


def _controls(body: Sampled) -> Iterator[Any]:
    if body.cache_control is not None:
        yield body.cache_control
    if not isinstance(body, ChatBody):
        return
    for message in body.messages:
        parts = message.content if isinstance(message.content, list) else []
        for holder in (message.model_extra or {}, *parts):
            if holder.get("cache_control") is not None:
                yield holder["cache_control"]


def _control_ttl(control: Any) -> float:
    ttl = control.get("ttl", "5m") if isinstance(control, dict) else None
    if not isinstance(ttl, str) or ttl not in CONTROL_TTLS or control.get("type") != "ephemeral":
        raise RequestError(
            'cache_control: give {"type": "ephemeral"} with ttl "5m" or "1h"', "cache_control"
        )
    return CONTROL_TTLS[ttl]
