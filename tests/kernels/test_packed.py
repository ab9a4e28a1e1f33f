"""Products with weights that stay packed, against the decoded weights in float64."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.gguf_files import coded
from model.kv_case import ISAS
from pagemill import _native
from pagemill.kernels.linear import embed, first_rows, linear
from pagemill.kernels.packed import PackedMatrix, can_pack, linear_packed, pack, stack

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
ROUNDING = {True: 2**-11, False: 2**-14}
"""Half a step of x, by whether codes have 4 bits: as a part of the largest x of 32 columns."""


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa_name()
    assert _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def make(name: str, num_rows: int, width: int) -> tuple[PackedMatrix, torch.Tensor]:
    """A random matrix, packed, and what it decodes to, float32 [N, K]."""
    kind = Kind[name]
    weight = torch.randn(num_rows, width).numpy() + np.float32(0.3)
    blocks = coded(weight, kind)
    decoded = gguf.dequantize(blocks, kind).reshape(num_rows, width)
    return pack(name, torch.from_numpy(blocks), width), torch.from_numpy(decoded)


def widths(name: str) -> tuple[int, ...]:
    return (256, 768) if name.endswith("_K") else (32, 96, 576)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 16, 19, 21, 48, 64, 65, 100])
def test_products_are_those_of_the_decoded_weights(isa: str, name: str, num_tokens: int) -> None:
    for num_rows, width in zip((50, 16, 3), widths(name), strict=False):
        matrix, decoded = make(name, num_rows, width)
        x = torch.randn(num_tokens, width) * torch.logspace(-3, 2, num_tokens)[:, None]
        got = linear_packed(x, matrix)
        want = x.double() @ decoded.double().T
        most = x.view(num_tokens, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32)
        step = ROUNDING["Q4" in name] * most.reshape(num_tokens, width).double()
        near = step @ decoded.double().abs().T + 2e-5 * (
            x.abs().double() @ decoded.abs().double().T
        )
        assert ((got - want).abs() <= near).all()
        one_by_one = torch.cat([linear_packed(x[i : i + 1], matrix) for i in range(num_tokens)])
        assert torch.equal(got, one_by_one)


@pytest.mark.parametrize("name", TYPES)
def test_instruction_sets_agree(name: str) -> None:
    """Sums of codes are exact everywhere; only the adding of scaled sums may round differently."""
    matrix, decoded = make(name, 70, 768)
    x = torch.randn(21, 768)
    before, results = _native.isa_name(), []
    for isa in ISAS:
        assert _native.set_isa(isa)
        results.append(linear_packed(x, matrix))
    _native.set_isa(before)
    scale = float((x.abs() @ decoded.abs().T).max())
    for result in results[1:]:
        assert float((result - results[0]).abs().max()) <= 1e-6 * scale


@pytest.mark.parametrize("name", TYPES)
def test_wide_rows_are_the_decoded_ones(isa: str, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("pagemill.kernels.packed.PIECE_VALUES", 512 * 32)
    matrix, decoded = make(name, 90, 512)
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        pieces = list(matrix.wide_rows(dtype))
        assert [first for first, _ in pieces] == [0, 32, 64]
        whole = torch.cat([piece for _, piece in pieces]).float()
        torch.testing.assert_close(whole, decoded, rtol=near, atol=1e-6)
    x = torch.randn(200, 512)
    want = x.double() @ decoded.double().T
    near = 2**-6 * (x.abs().double() @ decoded.abs().double().T)
    assert ((linear(x, matrix) - want).abs() <= near).all()


@pytest.mark.parametrize("name", TYPES)
def test_rows_decode_as_the_reference(name: str) -> None:
    matrix, decoded = make(name, 37, 512)
    ids = torch.tensor([0, 36, 5, 5, 16, 15])
    torch.testing.assert_close(matrix.rows(ids), decoded[ids], rtol=1e-6, atol=0)
    assert torch.equal(embed(ids, matrix), matrix.rows(ids))
    assert matrix.shape == (37, 512) and matrix.numel() == 37 * 512


def test_rounding_is_noticed() -> None:
    """Negative control: the bound above is one that half the bits of x do not meet."""
    matrix, decoded = make("Q8_0", 64, 576)
    x = torch.randn(16, 576)
    step = x.view(16, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(16, 576) / 127
    rough = ((x / step).round() * step).double() @ decoded.double().T
    want = x.double() @ decoded.double().T
    worst = (linear_packed(x, matrix) - want).abs().max()
    assert (rough - want).abs().max() > 20 * worst


def test_parts_of_several_types_stand_under_each_other(isa: str) -> None:
    some = [make(name, rows, 256) for name, rows in (("Q4_1", 40), ("Q8_0", 19), ("Q6_K", 8))]
    matrix = stack([packed for packed, _ in some])
    x, bias = torch.randn(6, 256), torch.randn(67)
    want = torch.cat([linear_packed(x, packed) for packed, _ in some], 1)
    assert torch.equal(linear(x, matrix), want)
    assert torch.equal(linear(x, matrix, bias), want + bias)
    assert matrix.num_bytes == sum(packed.num_bytes for packed, _ in some)


def test_first_rows_share_the_bytes(isa: str) -> None:
    matrix, _ = make("Q8_0", 50, 96)
    x = torch.randn(18, 96)
    part = first_rows(matrix, 21)
    assert torch.equal(linear(x, part), linear(x, matrix)[:, :21])
    with pytest.raises(ValueError, match="outside"):
        embed(torch.tensor([21]), part)


def test_zeros_and_what_is_no_number(isa: str) -> None:
    for name in ("Q4_1", "Q8_0"):
        matrix, _ = make(name, 20, 64)
        x = torch.randn(9, 64)
        x[1], x[2, 3], x[3, 40], x[4] = 0.0, float("nan"), float("inf"), 1e-38
        got = linear_packed(x, matrix)
        assert (got[1] == 0).all() and (got[4].abs() < 1e-35).all()
        assert got[2].isnan().all() and got[3].isnan().all()
        plain = [0, 5, 6, 7, 8]
        assert torch.equal(got[plain], linear_packed(x[plain].contiguous(), matrix))


def test_what_does_not_fit_is_refused() -> None:
    matrix, _ = make("Q4_1", 20, 64)
    part = matrix.parts[0]
    assert not can_pack("F16", 64) and not can_pack("Q4_K", 64) and not can_pack("Q4_1", 40)
    with pytest.raises(ValueError, match="cannot stay packed"):
        _native.linear_packed(torch.zeros(1, 64), "F16", part.packed, 20, torch.zeros(1, 20), 0)
    with pytest.raises(ValueError, match="whole blocks"):
        linear_packed(torch.zeros(2, 40), matrix)
    with pytest.raises(ValueError, match="fewer rows"):
        linear_packed(torch.zeros(2, 96), matrix)
    with pytest.raises(ValueError, match="blocks of the columns"):
        pack("Q4_1", torch.zeros(3, 39, dtype=torch.uint8), 64)
    with pytest.raises(TypeError):
        linear_packed(torch.zeros(2, 64, dtype=torch.float64), matrix)
