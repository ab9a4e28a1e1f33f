"""DELETE /v1/cache: what an operator drops from the cache."""

import asyncio
from collections.abc import Callable
from typing import Any

from pagemill.cache.manager import CacheManager
from pagemill.core.errors import RequestError
from pagemill.core.types import GroupId, IntBuffer
from pagemill.engine.engine import Engine
from pagemill.server.protocol import DropBody

TIMEOUT_S = 60.0


async def drop(engine: Engine, body: DropBody, token_ids: IntBuffer | None) -> dict[str, Any]:
    """The whole cache, a tenant's salt, or one prompt; blocks that are in use stay.

    ``token_ids``: of the prompt in the body, if it has one.
    """
    work = _work(body, token_ids)
    num_blocks = await asyncio.wait_for(asyncio.wrap_future(engine.call(work)), TIMEOUT_S)
    return {"object": "cache.dropped", "dropped_blocks": num_blocks}


def _work(body: DropBody, token_ids: IntBuffer | None) -> Callable[[CacheManager], int]:
    tenant, salt = body.tenant or "", body.cache_salt or ""
    if token_ids is not None:

        def drop_path(cache: CacheManager) -> int:
            return cache.forget(
                cache.peek_match(token_ids, cache.namespace(tenant=tenant, salt=salt))
            )

        return drop_path
    if body.tenant is not None or body.cache_salt is not None:
        return lambda cache: cache.forget_namespace(cache.namespace(tenant=tenant, salt=salt))
    return _drop_all


def _drop_all(cache: CacheManager) -> int:
    groups = range(len(cache.config.groups))
    return sum(cache.evict(cache.config.num_blocks[group], GroupId(group)) for group in groups)


def check(body: DropBody) -> None:
    """Raises RequestError where the body asks for two things."""
    if body.prompt is not None and body.messages is not None:
        raise RequestError("give prompt or messages, and not both", "prompt")
