"""Tenants share one pool: a quota each, and what is fair when blocks are short."""

import pytest

from model.small_cache import B, tokens
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.core.errors import ConfigError
from pagemill.core.events import BlockRemoved, CacheEvent
from pagemill.core.retention import KEEP_AS_USUAL, Retention


def make(
    num_blocks: int, quota: float = 1.0, is_fair: bool = False, **more: object
) -> CacheManager:
    config = CacheConfig(
        (LayerGroup("full", (0,)),), (num_blocks,), B, tenant_quota=quota, is_fair=is_fair
    )
    return CacheManager(config, **more)  # type: ignore[arg-type]


def ask(
    cache: CacheManager,
    tenant: int,
    first: int,
    num_blocks: int = 2,
    retention: Retention = KEEP_AS_USUAL,
) -> int:
    """Hit tokens of a prompt of so many blocks, which is cached afterwards."""
    root, prompt = cache.namespace(tenant=str(tenant)), tokens(num_blocks * B + 1, first)
    table = cache.open(cache.peek_match(prompt, root), root, tenant=tenant)
    hits = cache.num_tokens_cached(table)
    if not retention.is_default:
        cache.retain(table, retention, tenant)
    copies = cache.extend(table, num_blocks * B)
    assert copies is not None
    cache.release_copies(copies)
    cache.commit(table, prompt, num_blocks * B)
    cache.release(table)
    cache.check_integrity()
    return hits


def num_cached(cache: CacheManager, tenant: int, firsts: range) -> int:
    root = cache.namespace(tenant=str(tenant))
    return sum(cache.peek_match(tokens(33, first), root).num_tokens // B for first in firsts)


def test_a_tenant_keeps_its_quota_and_loses_only_its_own() -> None:
    events: list[CacheEvent] = []
    cache = make(21, quota=0.4, on_event=events.append)  # 8 of 20 blocks
    ask(cache, 2, 0)
    for i in range(10):
        ask(cache, 1, 100 * i)
        assert num_cached(cache, 1, range(0, 1000, 100)) <= 8
    assert num_cached(cache, 1, range(0, 1000, 100)) == 8
    assert num_cached(cache, 1, range(600, 1000, 100)) == 8  # the oldest went
    assert ask(cache, 2, 0) == 32  # untouched, though it is the oldest of all
    assert sum(isinstance(event, BlockRemoved) for event in events) == 12


def test_without_shares_a_flood_takes_everything() -> None:
    cache = make(21)
    ask(cache, 2, 0)
    for i in range(30):
        ask(cache, 1, 100 * i)
    assert ask(cache, 2, 0) == 0


def test_under_a_quota_alone_the_chosen_policy_ranks_all_tenants_together() -> None:
    config = CacheConfig((LayerGroup("full", (0,)),), (21,), B, eviction="lfu", tenant_quota=0.9)
    cache = CacheManager(config)
    for _ in range(3):
        ask(cache, 50, 0)  # neither the first nor the last of the tenants
    for tenant in range(1, 100):
        if tenant != 50:
            ask(cache, tenant, 100 * tenant)
    assert num_cached(cache, 50, range(1)) == 2
    assert num_cached(cache, 99, range(9900, 9901)) == 2


def test_who_has_most_loses_first() -> None:
    cache = make(21, is_fair=True)
    for i in range(3):
        ask(cache, 2, 100 * i)
    for i in range(30):
        ask(cache, 1, 100 * i)
    assert num_cached(cache, 2, range(0, 300, 100)) == 6
    assert num_cached(cache, 1, range(0, 3000, 100)) >= 13
    for i in range(3, 20):  # now the second one floods: they end up with equal parts
        ask(cache, 2, 100 * i)
    assert abs(num_cached(cache, 1, range(0, 3000, 100)) - 10) <= 2


def test_one_request_may_be_larger_than_the_quota_while_it_runs() -> None:
    cache = make(21, quota=0.2)
    assert ask(cache, 1, 0, num_blocks=15) == 0
    assert cache.stats().groups[0].num_evictable == 4


def test_a_quota_is_a_part_of_the_pool() -> None:
    with pytest.raises(ConfigError, match="tenant_quota"):
        make(20, quota=0.0)


@pytest.mark.parametrize("retention", [Retention(ttl_ns=10**15), Retention(90), Retention(20)])
def test_no_retention_gets_around_a_share(retention: Retention) -> None:
    for shares in ({"quota": 0.5}, {"is_fair": True}):
        cache = make(21, **shares)  # type: ignore[arg-type]
        for i in range(20):
            ask(cache, 1, 100 * i, retention=retention)
            ask(cache, 2, 100 * i)
        assert num_cached(cache, 1, range(0, 2000, 100)) <= 11
        assert num_cached(cache, 2, range(0, 2000, 100)) >= 9


def test_pins_count_inside_the_quota() -> None:
    cache = make(41, quota=0.25)
    for i in range(10):
        ask(cache, 1, 100 * i, retention=Retention(is_pinned=True))
    assert num_cached(cache, 1, range(0, 1000, 100)) == 10
    for i in range(10):
        ask(cache, 2, 100 * i, retention=Retention(is_pinned=True))
        ask(cache, 3, 100 * i)
    assert num_cached(cache, 3, range(0, 1000, 100)) == 10
