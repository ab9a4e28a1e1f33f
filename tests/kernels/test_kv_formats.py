"""Every KV format: the bytes that are written, against codec.py; what is read, against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model.kv_case import ISAS, make_case
from pagemill import _native
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.attention_cpu import paged_attention
from pagemill.kernels.attention_ref import paged_attention_ref
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.codec import FORMATS, decode_group, encode_group, hadamard
from pagemill.kernels.kv_storage import KVStorage

BY_TOKEN = [name for name, entry in FORMATS.items() if not entry.codes_whole_groups]
CODED = ["i8", "f8", "k8v4"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> object:
    before = _native.isa_name()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def storage(kv_format: str, dim: int, num_blocks: int = 5, block_size: int = 32) -> KVStorage:
    config = CacheConfig((LayerGroup("g", (0,)),), (num_blocks,), block_size)
    return KVStorage(config, kv_format, 2, dim, num_tails=3)


def hard_rows(dim: int) -> tuple[Tensor, Tensor]:
    """96 tokens of 2 heads: channels of all sizes, zeros, equal rows, huge, tiny, not finite."""
    torch.manual_seed(dim)
    k = torch.randn(96, 2, dim) * torch.logspace(-2, 2, dim)
    v = torch.randn(96, 2, dim)
    k[5], v[7], v[8] = 0, 0, -0.0
    k[9, 0, 0], v[3], k[16:32] = 3e4, v[3] * 1e-9, 1.25
    k[4] *= 1e4
    v[11, 1, 3], k[12, 0, 0] = float("nan"), float("inf")
    return k, v


def in_groups(x: Tensor) -> Tensor:
    """[96, 2, D] to [3 blocks, 2 heads, 2 groups, 16, D]."""
    return x.view(3, 2, 16, 2, -1).permute(0, 3, 1, 2, 4)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_format", CODED)
def test_bytes_are_those_of_the_codec(isa: str, kv_format: str, dim: int) -> None:
    k, v = hard_rows(dim)
    kv, entry = storage(kv_format, dim), FORMATS[kv_format]
    kv.write_kv(0, k, v, torch.arange(32, 128))
    k = hadamard(k) if entry.rotates_k else k
    v = hadamard(v) if entry.rotates_v else v
    want = encode_group(kv_format, in_groups(k), in_groups(v)).flatten(1)
    assert torch.equal(kv.tiles(0)[1:4], want)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("kv_format", list(FORMATS))
def test_decoding_comes_close(kv_format: str, dim: int) -> None:
    """Mean relative error of normal numbers, a little over what was seen."""
    torch.manual_seed(1)
    k, v = torch.randn(9, 16, dim), torch.randn(9, 16, dim)
    keys, values = decode_group(kv_format, encode_group(kv_format, k, v), dim)
    most = {"fp32": (0, 0), "bf16": (0.002, 0.002), "i8": (0.008, 0.008), "f8": (0.03, 0.03),
            "k8v4": (0.008, 0.1), "i4c": (0.08, 0.1)}[kv_format]  # fmt: skip
    assert float((keys - k).norm() / k.norm()) <= most[0]
    assert float((values - v).norm() / v.norm()) <= most[1]


@pytest.mark.parametrize("kv_format", CODED)
def test_one_large_channel_costs_the_others_little(kv_format: str) -> None:
    """Keys with one channel 50 times larger (cases: outlier channel)."""
    torch.manual_seed(2)
    kv = storage(kv_format, 64)
    k = torch.randn(32, 2, 64)
    k[..., 7] *= 50
    kv.write_kv(0, k, k, torch.arange(32, 64))
    keys, _ = kv.layouts[0].decode_tiles(kv.tiles(0)[1:2])
    assert float((keys[0] - k).norm() / k.norm()) < 0.03


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(
    ("dim", "num_heads", "num_kv_heads"),
    [(64, 9, 3), (128, 8, 2), (80, 4, 4), (96, 6, 1), (256, 4, 1)],
)
@pytest.mark.parametrize("kv_format", CODED)
def test_attention_over_coded_tiles(
    isa: str, kv_format: str, dim: int, num_heads: int, num_kv_heads: int, window: int | None
) -> None:
    """8-bit queries and 16-bit weights: relative error under 1 %, f8 is read in float32."""
    case = make_case(
        [(100, 1), (0, 40), (33, 17), (700, 1), (1000, 50)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        kv_format=kv_format,
        window=window,
    )
    got = paged_attention(case.q, case.storage, 1, case.batch, case.scale, window)
    want = paged_attention_ref(case.q, case.storage, 1, case.batch, case.scale, window)
    error = float((got - want).norm() / want.norm())
    assert error < (1e-5 if kv_format == "f8" else 0.01)
    assert not torch.isnan(got).any()


@pytest.mark.parametrize("kv_format", CODED)
def test_a_row_is_the_same_bits_alone_or_in_a_chunk(isa: str, kv_format: str) -> None:
    case = make_case([(613, 30)], num_heads=6, num_kv_heads=2, head_dim=64, kv_format=kv_format)
    whole = paged_attention(case.q, case.storage, 1, case.batch, case.scale)
    for row in (0, 13, 29):
        one = AttentionBatch(
            np.array([0, 1], np.int32),
            np.array([613 + row], np.int32),
            case.batch.block_ids,
            case.batch.indptr,
        )
        alone = paged_attention(case.q[row : row + 1], case.storage, 1, one, case.scale)
        assert torch.equal(alone[0], whole[row])


def test_a_missing_scale_is_loud() -> None:
    """A tile whose scales are NaN gives NaN, never 1.0 (cases: missing scale)."""
    for kv_format in CODED:
        case = make_case([(20, 1)], num_heads=1, head_dim=64, kv_format=kv_format)
        meta = FORMATS[kv_format].meta_bytes(64)
        tiles = case.storage.tiles(1)
        tiles[int(case.batch.block_ids[0]), :meta] = 0x7E
        out = paged_attention(case.q, case.storage, 1, case.batch, case.scale)
        assert torch.isnan(out).all(), kv_format


# ---------------------------------------------------------------- centers, sinks


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float,
                   sinks: Tensor) -> Tensor:  # fmt: skip
    """One token of H heads over [T, K, D], with a soft cap and a logit without a value."""
    each = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(each, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    return torch.einsum("ht,thd->hd", weights, v).float()


@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize("kv_format", BY_TOKEN)
def test_centers_change_nothing_but_the_error(isa: str, kv_format: str, cap: float) -> None:
    """Keys with a large constant part, a soft cap and sinks: the center is added back."""
    torch.manual_seed(3)
    center = torch.randn(2, 64) * 20
    k, v = torch.randn(40, 2, 64) + center, torch.randn(40, 2, 64)
    q, sinks = torch.randn(1, 6, 64), torch.randn(6)
    config = CacheConfig((LayerGroup("g", (0,)),), (4,))
    slots = torch.arange(16, 56)
    batch = AttentionBatch(*(np.array(x, np.int32) for x in ([0, 1], [39], [1, 2, 3], [0, 3])))
    errors = []
    want = attend_plainly(q[0], k, v, 0.125, cap, sinks)
    for centers in (None, center[None]):
        kv = KVStorage(config, kv_format, 2, 64, centers=centers)
        kv.write_kv(0, k, v, slots)
        got = paged_attention(q, kv, 0, batch, 0.125, softcap=cap or None, sinks=sinks)[0]
        errors.append(float((got - want).norm() / want.norm()))
    bound = {"fp32": 1e-5, "bf16": 0.01, "i8": 0.03, "f8": 0.1, "k8v4": 0.12}[kv_format]
    assert errors[1] < bound
    assert errors[1] < errors[0] or kv_format == "fp32"


# ---------------------------------------------------------------- whole groups


def step(start: int, count: int, table: Tensor, slot: int = 1) -> AttentionBatch:
    return AttentionBatch(
        np.array([0, count], np.int32),
        np.array([start], np.int32),
        table.int().numpy(),
        np.array([0, len(table)], np.int32),
        np.array([slot], np.int32),
    )


def run_i4c(dim: int, num_heads: int, block_size: int, chunks: list[int],
            window: int | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """333 tokens written and read in chunks: what attention gave, and the tiles in token order."""
    torch.manual_seed(4)
    spread = torch.logspace(-1, 1, dim)
    k, v = torch.randn(333, 2, dim) * spread, torch.randn(333, 2, dim)
    q = torch.randn(333, num_heads, dim) / spread
    kv = storage("i4c", dim, 333 // block_size + 3, block_size)
    table, outs, start = torch.randperm(333 // block_size + 1) + 1, [], 0
    while start < 333:
        count = min(chunks[len(outs) % len(chunks)], 333 - start)
        rows, batch = slice(start, start + count), step(start, count, table)
        kv.write_step(0, k[rows], v[rows], batch)
        outs.append(paged_attention(q[rows], kv, 0, batch, dim**-0.5, window))
        start += count
    groups = kv.tiles(0)[table].view(len(table), 2, block_size // 16, -1).transpose(1, 2)
    return torch.cat(outs), groups.reshape(-1, 2, groups.shape[-1])[:20]


def expected_i4c(dim: int, num_heads: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The read rule plainly: a token reads its own group of 16 in bf16, earlier ones coded."""
    torch.manual_seed(4)
    spread = torch.logspace(-1, 1, dim)
    k, v = torch.randn(333, 2, dim) * spread, torch.randn(333, 2, dim)
    q = torch.randn(333, num_heads, dim) / spread
    k, v = k.bfloat16().float(), hadamard(v).bfloat16().float()
    groups = [x[:320].view(20, 16, 2, dim).transpose(1, 2) for x in (k, v)]
    codes = encode_group("i4c", groups[0], groups[1])
    coded = [x.transpose(1, 2).reshape(320, 2, dim) for x in decode_group("i4c", codes, dim)]
    rows = []
    for t in range(333):
        own, first = t // 16 * 16, max(0, t - window + 1) if window else 0
        keys, values = (
            torch.cat([a[:own], b[own : t + 1]])[first:] for a, b in zip(coded, (k, v), strict=True)
        )
        sinks = torch.full((num_heads,), -1e30)
        rows.append(attend_plainly(q[t], keys, values, dim**-0.5, 0.0, sinks))
    return hadamard(torch.stack(rows)), codes


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("dim", "num_heads", "block_size"),
                         [(64, 6, 16), (80, 2, 32), (128, 8, 64), (256, 8, 128)])  # fmt: skip
def test_i4c_reads_its_own_group_raw_and_earlier_ones_coded(
    isa: str, dim: int, num_heads: int, block_size: int, window: int | None
) -> None:
    want, codes = expected_i4c(dim, num_heads, window)
    runs = [run_i4c(dim, num_heads, block_size, c, window) for c in ([333], [1], [7, 50, 3, 16])]
    for out, groups in runs:
        assert torch.equal(groups, codes)
        assert torch.equal(out, runs[0][0]), "the result depends on the chunks"
        assert float((out - want).norm() / want.norm()) < 0.015


def test_i4c_needs_its_sequences_and_a_slot() -> None:
    kv = storage("i4c", 64)
    k, table = torch.zeros(3, 2, 64), torch.tensor([1])
    with pytest.raises(ValueError, match="whole groups"):
        kv.write_kv(0, k, k, torch.arange(16, 19))
    for slot in (-1, 3):
        with pytest.raises(ValueError, match="tail slot"):
            kv.write_step(0, k, k, step(0, 3, table, slot))
    with pytest.raises(ValueError, match="tail slot"):
        batch = step(0, 3, table)
        kv.write_step(0, k, k, AttentionBatch(batch.query_start, batch.context_start,
                                              batch.block_ids, batch.indptr))  # fmt: skip


def test_a_fork_goes_on_from_a_copy_of_the_tail() -> None:
    torch.manual_seed(5)
    kv = storage("i4c", 64)
    k, v, q = torch.randn(24, 2, 64), torch.randn(24, 2, 64), torch.randn(24, 2, 64)
    kv.write_step(0, k[:10], v[:10], step(0, 10, torch.tensor([1]), 0))
    kv.copy_tails([(0, 2)])
    outs = []
    for slot, block in ((0, 1), (2, 3)):
        batch = step(10, 14, torch.tensor([block]), slot)
        kv.write_step(0, k[10:], v[10:], batch)
        outs.append(paged_attention(q[10:], kv, 0, batch, 0.125))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(kv.tiles(0)[1], kv.tiles(0)[3])


def test_layers_may_have_formats_of_their_own() -> None:
    groups = (LayerGroup("full", (0, 2)), LayerGroup("window", (1,), 32))
    kv = KVStorage(CacheConfig(groups, (4, 3)), ["i8", "bf16", "k8v4"], 2, 64)
    assert [kv.layouts[i].kv_format for i in range(3)] == ["i8", "bf16", "k8v4"]
    assert kv.block_bytes(0) == 2 * (2112 + 1664)
    k = torch.randn(16, 2, 64)
    for layer in range(3):
        kv.write_kv(layer, k, k, torch.arange(16, 32))
    kv.copy_blocks(0, [(1, 2)])
    assert torch.equal(kv.read_block(0, 1), kv.read_block(0, 2))
    kv.write_block(0, 3, kv.read_block(0, 1))
    assert torch.equal(kv.tiles(2)[3], kv.tiles(2)[1])


@pytest.mark.parametrize("kv_format", ["bf16", "i8", "f8", "k8v4"])
@pytest.mark.parametrize(("num_kv_heads", "dim"), [(3, 64), (16, 128), (1, 256)])
def test_the_bytes_do_not_depend_on_threads(kv_format: str, num_kv_heads: int, dim: int) -> None:
    """Tokens t and t + 8 of a group share bytes where V has 4 bits; slots in any order."""
    torch.manual_seed(6)
    config = CacheConfig((LayerGroup("g", (0,)),), (34,))
    k, v = torch.randn(512, num_kv_heads, dim), torch.randn(512, num_kv_heads, dim)
    order, before, tiles = torch.randperm(512) + 16, _native.num_threads(), []
    for num_threads in (1, 2, 8, 2, 2):
        _native.set_num_threads(num_threads)
        kv = KVStorage(config, kv_format, num_kv_heads, dim)
        kv.write_kv(0, k, v, order)
        tiles.append(kv.tiles(0).clone())
    _native.set_num_threads(before)
    assert all(torch.equal(tiles[0], other) for other in tiles[1:])


def test_slots_that_are_no_slots() -> None:
    kv, k = storage("bf16", 64), torch.zeros(1, 2, 64)
    for slot in (torch.tensor([2**32]), torch.tensor([-(2**32)]), torch.tensor([1.5])):
        with pytest.raises(ValueError, match="slot"):
            kv.write_kv(0, k, k, slot)


def test_two_sequences_never_share_a_tail_slot() -> None:
    kv, k = storage("i4c", 64), torch.zeros(2, 2, 64)
    batch = AttentionBatch(*(np.array(x, np.int32) for x in (
        [0, 1, 2], [0, 0], [1, 2], [0, 1, 2], [1, 1])))  # fmt: skip
    with pytest.raises(ValueError, match="one tail slot"):
        kv.write_step(0, k, k, batch)
