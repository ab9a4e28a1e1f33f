"""Attention in Triton against the textbook and against the CPU's kernels."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model.gpu_case import (
    DEVICE,
    KERNELS,
    attend_plainly,
    bound,
    error,
    next_step,
    sequences,
    storages,
    write_in_host,
)
from model.kv_case import Case, make_case
from pagemill.core.layers import CacheConfig
from pagemill.kernels.attention_cpu import paged_attention
from pagemill.kernels.attention_ref import paged_attention_ref
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.codec import FORMATS
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.triton import plan
from pagemill.kernels.triton.plan import SPLIT_TOKENS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter on NaN and inf
BY_TOKEN = [name for name, entry in FORMATS.items() if not entry.codes_whole_groups]
SHAPES = [(64, 6, 2, 32), (80, 4, 4, 16), (256, 5, 1, 16)]  # head dim, heads, KV heads, block size


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits and more without long sequences: the interpreter is slow."""
    monkeypatch.setattr(plan, "SPLIT_TOKENS", 32)


def on_device(case: Case) -> KVStorage:
    """The case's bytes on the device, moved page by page."""
    host = case.storage
    config = CacheConfig(host.groups, host.num_blocks, host.block_size)
    storage = KERNELS.make_storage(
        config, host.layouts[1].kv_format, host.num_kv_heads, host.head_dim
    )
    for block in range(host.num_blocks[0]):
        storage.write_block(0, block, host.read_block(0, block))
    return storage


def attend(case: Case, storage: KVStorage) -> Tensor:
    return KERNELS.paged_attention(
        case.q.to(DEVICE), storage, 1, case.batch, case.scale, case.window
    ).cpu()


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("dim", "num_heads", "num_kv_heads", "block_size"), SHAPES)
@pytest.mark.parametrize("kv_format", BY_TOKEN)
def test_any_mix_of_chunks_and_single_tokens(
    kv_format: str, dim: int, num_heads: int, num_kv_heads: int, block_size: int, window: int | None
) -> None:
    """Decode over one split and over three, a whole prompt, a later chunk of one; NaN lies behind
    every end and in the blocks that left the window."""
    case = make_case(
        [(15, 1), (0, 20), (33, 17), (70, 1)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        block_size=block_size,
        kv_format=kv_format,
        window=window,
    )
    got = attend(case, on_device(case))
    want = paged_attention_ref(case.q, case.storage, 1, case.batch, case.scale, window)
    assert error(got, want) < bound(kv_format)


def test_swapped_blocks_are_noticed() -> None:
    """Negative control."""
    case = make_case([(40, 1), (40, 1)], num_heads=2, head_dim=64, kv_format="i8")
    want = paged_attention_ref(case.q, case.storage, 1, case.batch, case.scale)
    case.batch.block_ids[[0, 3]] = case.batch.block_ids[[3, 0]]
    assert error(attend(case, on_device(case)), want) > 100 * bound("i8")


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "k8v4"])
def test_a_row_is_the_same_bits_alone_or_in_company(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With splits of the real length."""
    monkeypatch.setattr(plan, "SPLIT_TOKENS", SPLIT_TOKENS)
    spans = [(600, 1), (13, 1), (31, 3)]
    case = make_case(spans, num_heads=6, num_kv_heads=2, head_dim=64, kv_format=kv_format)
    storage = on_device(case)
    whole = attend(case, storage)
    ids = case.batch.block_ids[: case.batch.indptr[1]]
    one = AttentionBatch(*(np.array(x, np.int32) for x in ([0, 1], [600], ids, [0, len(ids)])))
    alone = KERNELS.paged_attention(case.q[:1].to(DEVICE), storage, 1, one, case.scale)
    assert torch.equal(alone[0].cpu(), whole[0])


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kv_format", ["fp32", "i8", "i4c"])
def test_caps_sinks_and_centers(kv_format: str, has_sinks: bool, cap: float | None) -> None:
    """Where the constant part of the keys counts it is added back; two splits, and a chunk."""
    center, counts = torch.randn(2, 64) * 3, [70, 20]
    whole, num_blocks = sequences([(0, 80), (0, 25)], 16)
    host, device = storages(
        kv_format, 64, num_blocks=num_blocks, block_size=16, centers=center[None]
    )
    k, v = torch.randn(90, 2, 64) + center, torch.randn(90, 2, 64)
    write_in_host(host, k, v, next_step(whole, [0, 0], counts))
    device.write_step(0, k.to(DEVICE), v.to(DEVICE), next_step(whole, [0, 0], counts))
    batch, q = next_step(whole, counts, [1, 3]), torch.randn(4, 6, 64)
    new_k, new_v = torch.randn(4, 2, 64) + center, torch.randn(4, 2, 64)
    write_in_host(host, new_k, new_v, batch)
    prepared = KERNELS.prepare(batch, device, 0)
    device.write_step(0, new_k.to(DEVICE), new_v.to(DEVICE), prepared)
    sinks = torch.randn(6) if has_sinks else None
    tokens = [
        (torch.cat([k[:70], new_k[:1]]), torch.cat([v[:70], new_v[:1]])),
        (torch.cat([k[70:], new_k[1:]]), torch.cat([v[70:], new_v[1:]])),
    ]
    want = attend_plainly(q, host, batch, tokens, center=center, cap=cap, sinks=sinks)
    on_device = None if sinks is None else sinks.to(DEVICE)
    got = KERNELS.paged_attention(q.to(DEVICE), device, 0, prepared, 0.125, None, cap, on_device)
    assert error(got, want) < bound(kv_format)
    compiled = paged_attention(q, host, 0, batch, 0.125, None, cap, sinks)
    assert error(got, compiled) < 0.02


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("dim", "num_heads", "num_kv_heads", "block_size"), SHAPES)
def test_i4c_reads_its_own_group_raw(
    dim: int, num_heads: int, num_kv_heads: int, block_size: int, window: int | None
) -> None:
    """Two sequences in uneven steps, by the read rule and beside the CPU's kernels."""
    whole, num_blocks = sequences([(0, 51), (0, 25)], block_size)
    host, device = storages(
        "i4c", dim, num_kv_heads=num_kv_heads, num_blocks=num_blocks, block_size=block_size,
        window=window,
    )  # fmt: skip
    starts, tokens = [0, 0], [(torch.empty(0, num_kv_heads, dim),) * 2] * 2
    for counts in ([40, 3], [1, 20], [9, 1], [1, 1]):
        batch = next_step(whole, starts, counts)
        k, v = (torch.randn(sum(counts), num_kv_heads, dim) for _ in range(2))
        q = torch.randn(sum(counts), num_heads, dim)
        new = zip(k.split(counts), v.split(counts), strict=True)
        tokens = [
            (torch.cat([old[0], more[0]]), torch.cat([old[1], more[1]]))
            for old, more in zip(tokens, new, strict=True)
        ]
        host.write_step(0, k, v, batch)
        prepared = KERNELS.prepare(batch, device, 0)
        device.write_step(0, k.to(DEVICE), v.to(DEVICE), prepared)
        got = KERNELS.paged_attention(q.to(DEVICE), device, 0, prepared, dim**-0.5, window)
        want = attend_plainly(q, host, batch, tokens, window=window)
        assert error(got, want) < bound("i4c")
        compiled = paged_attention(q, host, 0, batch, dim**-0.5, window)
        assert error(got, compiled) < 0.02
        starts = [a + b for a, b in zip(starts, counts, strict=True)]
