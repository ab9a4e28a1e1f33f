"""DELETE /v1/cache: what an operator drops from the cache."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.cache.manager import CacheManager
from pagemill.core.errors import RequestError
from pagemill.core.types import GroupId, IntBuffer
from pagemill.engine.engine import Engine
from pagemill.server.protocol import DropBody

TIMEOUT_S = 60.0


async def drop(engine: Engine, body: DropBody, token_ids: IntBuffer | None) -> dict[str, Any]:
    """The whole cache, a tenant, one salt of it, or one prompt; blocks that are in use stay.

    ``token_ids``: of the prompt in the body, if it has one.
    """
    work = _work(engine, body, token_ids)
    num_blocks = await asyncio.wait_for(asyncio.wrap_future(engine.call(work)), TIMEOUT_S)
    return {"object": "cache.dropped", "dropped_blocks": num_blocks}


def _work(
    engine: Engine, body: DropBody, token_ids: IntBuffer | None
) -> Callable[[CacheManager], int]:
    tenant = body.tenant or ""

    def namespace(cache: CacheManager) -> bytes:
        return cache.namespace(tenant=tenant, salt=body.cache_salt or "")

    if token_ids is not None:
        return lambda cache: cache.forget(token_ids, namespace(cache))
    if body.cache_salt is not None:
        return lambda cache: cache.forget_namespace(namespace(cache))
    if body.tenant is not None:
        return lambda cache: sum(map(cache.forget_namespace, engine.namespaces(tenant)))
    return _drop_all


def _drop_all(cache: CacheManager) -> int:
    groups = range(len(cache.config.groups))
    return sum(cache.evict(cache.config.num_blocks[group], GroupId(group)) for group in groups)


def check(body: DropBody, tenants: Sequence[str]) -> None:
    """Raises RequestError where the body asks for two things, or for nobody's."""
    if body.prompt is not None and body.messages is not None:
        raise RequestError("give prompt or messages, and not both", "prompt")
    is_one = body.prompt is not None or body.messages is not None or body.cache_salt is not None
    if (is_one or body.tenant is not None) and (body.tenant or "") not in tenants:
        raise RequestError(
            "tenant: name one of this server's tenants, 16 hexadecimal digits each (docs/cache.md)",
            "tenant",
        )
