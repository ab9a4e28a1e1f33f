"""Tenants, salts, lifetimes, and what the operator may do, over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.live_server import LiveServer
from pagemill.server.tenants import tenant_of

PROMPT = "The secret of the first tenant stands in this long prompt, which is cached. " * 8
KEYS = ("key-one", "key-two")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., LiveServer], smollm2: Path) -> LiveServer:
    return start_server(smollm2, num_blocks=400, api_keys=KEYS, operator_key="the-operator")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(server: LiveServer, key: str, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **more}
    return server.http.post("/v1/completions", json=body, headers=bearer(key))


def hits(server: LiveServer, key: str, **more: Any) -> int:
    answer = ask(server, key, **more)
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def drop(server: LiveServer, key: str, body: Any = None) -> httpx.Response:
    return server.http.request("DELETE", "/v1/cache", json=body or {}, headers=bearer(key))


def test_tenants_never_share_and_a_salt_counts_inside_its_tenant(server: LiveServer) -> None:
    assert hits(server, "key-one") == 0
    length = hits(server, "key-one")
    assert length > 100
    assert hits(server, "key-two") == 0
    for stolen in ("key-one", tenant_of("key-one"), ""):  # whatever salt the other sends
        assert hits(server, "key-two", cache_salt=stolen) in (0, length * (stolen == ""))
    assert hits(server, "key-one", cache_salt="own") == 0
    assert hits(server, "key-one", cache_salt="own") == length


def test_no_body_drops_everything(server: LiveServer) -> None:
    """As curl -X DELETE sends it."""
    answer = server.http.request("DELETE", "/v1/cache", headers=bearer("the-operator"))
    assert answer.status_code == 200 and answer.json()["object"] == "cache.dropped"


def test_only_the_operator_drops(server: LiveServer) -> None:
    length = hits(server, "key-one") or hits(server, "key-one")
    for key in (*KEYS, "nonsense", ""):
        answer = drop(server, key)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
    assert hits(server, "key-one") == length
    assert ask(server, "the-operator").status_code == 401  # its key asks for nothing
    hits(server, "key-two")
    one = drop(server, "the-operator", {"tenant": tenant_of("key-one"), "prompt": PROMPT})
    assert one.status_code == 200 and one.json()["dropped_blocks"] > 5
    assert hits(server, "key-one") == 0 and hits(server, "key-two") == length
    hits(server, "key-two", cache_salt="of its own")
    gone = drop(server, "the-operator", {"tenant": tenant_of("key-two")})
    assert gone.json()["dropped_blocks"] > 5 and hits(server, "key-two") == 0
    assert hits(server, "key-two", cache_salt="of its own") == 0
    assert drop(server, "the-operator").json()["dropped_blocks"] > 5
    assert hits(server, "key-one") == 0
    server.wait_idle()


def test_wrong_drops_are_refused(server: LiveServer) -> None:
    for body, word in (
        ({"prompt": "a", "messages": []}, "not both"),
        ({"prompt": "", "tenant": tenant_of("key-one")}, "empty"),
        ({"tenant": 7}, "tenant"),
        ({"tenant": "nobody"}, "tenant"),
        ({"prompt": PROMPT}, "tenant"),
        ({"cache_salt": "s"}, "tenant"),
    ):
        answer = drop(server, "the-operator", body)
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_priority", 101),
        ("cache_priority", -1),
        ("cache_priority", "high"),
        ("cache_ttl", 0),
        ("cache_ttl", 1e9),
        ("cache_pin", "yes"),
        ("prompt_cache_retention", "for ever"),
        ("prompt_cache_key", 5),
        ("cache_control", {"type": "ephemeral", "ttl": "2d"}),
        ("cache_control", {"type": "eternal"}),
        ("cache_control", 5),
    ],
)
def test_wrong_retentions_are_refused_by_name(server: LiveServer, field: str, value: Any) -> None:
    answer = ask(server, "key-one", **{field: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_a_kept_prompt_outlives_a_flood(
    start_server: Callable[..., LiveServer], smollm2: Path
) -> None:
    """20 blocks of cache and a flood of 60: what has a lifetime, a pin or a high band stays."""
    server = start_server(smollm2, num_blocks=60)
    kept = {"cache_ttl": 600.0}, {"cache_pin": True}, {"cache_priority": 90}, {}
    prompts = [f"{i}: a prompt that is asked again later, or not at all. " * 4 for i in range(4)]
    for prompt, fields in zip(prompts, kept, strict=True):
        hits(server, "", prompt=prompt, prompt_cache_key="session", **fields)
    for i in range(30):
        hits(server, "", prompt=f"{i} flows by. {i * i} flows by as well. " * 6)
    found = [hits(server, "", prompt=prompt) > 30 for prompt in prompts]
    assert found == [True, True, True, False]
