"""Fused steps and products against plain torch."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from model.kv_case import ISAS
from pagemill import _native
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.fused import gelu_tanh_mul, rms_norm, rope_and_write, silu_mul
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.linear import HAS_BF16_PRODUCT, linear, linear_bf16, widen


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa_name()
    assert _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float64: what is compared with it carries only the rounding of the code under test."""
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(1, 576), (7, 640), (300, 33), (2, 5), (0, 16)])
def test_rms_norm(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    want = plain_norm(x, weight, 1e-5).float()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1536), (5, 100), (200, 33), (1, 3), (0, 8)])
def test_activations(shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1]) * 10
    gate_up[:, :1] = 1000.0
    gate_up[:, 1:2] = -1000.0
    gate, up = (half.double() for half in gate_up.chunk(2, 1))
    want = (functional.silu(gate) * up).float()
    torch.testing.assert_close(silu_mul(gate_up), want, rtol=1e-5, atol=1e-5)
    want = (functional.gelu(gate, approximate="tanh") * up).float()
    # 1 + tanh cancels to 1e-7, and is multiplied with a gate up to 6 and an up to 50
    torch.testing.assert_close(gelu_tanh_mul(gate_up), want, rtol=1e-5, atol=5e-5)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (16, 16), (48, 20), (256, 256)])
def test_rope_and_write(normed: bool, dim: int, rotary_dim: int) -> None:
    storage = KVStorage(CacheConfig((LayerGroup("g", (4, 5)),), (9,), 32), "fp32", 2, dim)
    num_tokens = 70
    qkv = torch.randn(num_tokens, 6 + 4, dim)
    angles = torch.rand(500, rotary_dim // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 500, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(8 * 32)[:num_tokens].int() + 32
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    q, k, v = (x.double() for x in qkv.split([6, 2, 2], 1))
    if norms[0] is not None and norms[1] is not None:
        q, k = plain_norm(q, norms[0], 1e-5), plain_norm(k, norms[1], 1e-5)
    cos, sin = table[positions.long()].double().chunk(2, 1)
    want_q, want_k = turn(q, cos, sin).float(), turn(k, cos, sin).float()
    got = rope_and_write(
        qkv,
        table,
        positions,
        slots,
        storage,
        5,
        query_norm=norms[0],
        key_norm=norms[1],
        eps=1e-5,
    )
    near = {"rtol": 1e-5, "atol": 3e-5}  # a * cos - b * sin cancels: terms up to 20, sums near 0
    torch.testing.assert_close(got, want_q, **near)
    assert got.data_ptr() == qkv.data_ptr()
    keys, values = storage.layouts[5].decode_tiles(storage.tiles(5))
    torch.testing.assert_close(keys.flatten(0, 1)[slots.long()], want_k, **near)
    assert torch.equal(values.flatten(0, 1)[slots.long()], v.float())


def test_rope_refuses_what_does_not_fit() -> None:
    storage = KVStorage(CacheConfig((LayerGroup("g", (0,)),), (3,)), "fp32", 1, 16)
    qkv, table = torch.zeros(2, 4, 16), torch.zeros(10, 16)
    good = torch.tensor([16, 17], dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    rope_and_write(qkv, table, start, good, storage, 0)
    for positions, slots in [(start, good + 40), (start + 9, good), (start[:1], good)]:
        with pytest.raises(ValueError):
            rope_and_write(qkv, table, positions, slots, storage, 0)
    with pytest.raises(ValueError, match="table"):
        rope_and_write(qkv, torch.zeros(10, 32), start, good, storage, 0)
    with pytest.raises(ValueError, match="shape"):
        rope_and_write(qkv[:, :2].contiguous(), table, start, good, storage, 0)
    with pytest.raises(TypeError):
        rope_and_write(qkv, table, start.long(), good, storage, 0)
    with pytest.raises(ValueError, match="one weight a channel"):
        rope_and_write(qkv, table, start, good, storage, 0, key_norm=torch.zeros(8))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 16, 31, 48, 64])
@pytest.mark.parametrize(("num_rows", "width"), [(576, 576), (50, 30), (7, 1), (25, 100)])
def test_linear_bf16(num_tokens: int, num_rows: int, width: int) -> None:
    weight = torch.randn(num_rows, width).bfloat16()
    x = torch.randn(num_tokens, width)
    want = (x.double() @ weight.double().T).float()
    got = linear_bf16(x, weight)
    # AMX takes x as two bfloat16: 2^-18 of each product is lost
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4 + width * 2**-20)
    one_by_one = torch.cat([linear_bf16(x[i : i + 1], weight) for i in range(num_tokens)])
    assert torch.equal(got, one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_linear(dtype: torch.dtype, num_tokens: int) -> None:
    weight, bias, x = torch.randn(40, 64).to(dtype), torch.randn(40), torch.randn(num_tokens, 64)
    rounding = 1e-5
    if dtype == torch.bfloat16 and num_tokens > _native.linear_tokens() and HAS_BF16_PRODUCT:
        x = x.bfloat16().float()
        rounding = 2**-8  # of the product, before the bias is added: their sum may cancel
    product = x.double() @ weight.double().T
    near = rounding * product.abs() + 2e-4
    assert ((linear(x, weight, bias) - (product + bias)).abs() <= near).all()
    assert ((linear(x, weight) - product).abs() <= near).all()
    assert ((linear(x, weight) - (product + bias)).abs() > near).any(), "the bias does count"


def test_widen_is_exact() -> None:
    weight = torch.randn(301, 517).bfloat16()
    assert torch.equal(widen(weight), weight.float())


def test_wrong_arrays_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(TypeError):
        linear_bf16(x, weight)
    with pytest.raises(ValueError, match="columns"):
        linear_bf16(x[:, :4].contiguous(), weight.bfloat16())
    with pytest.raises(TypeError):
        rms_norm(x.double(), torch.zeros(8), 1e-5)
    with pytest.raises(TypeError):
        rms_norm(torch.zeros(8, 2).T, torch.zeros(8), 1e-5)
    with pytest.raises(ValueError):
        rms_norm(x, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError):
        silu_mul(torch.zeros(2, 7))
