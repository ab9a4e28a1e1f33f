"""The compiled attention against the plain one, torch's own, and itself in other company."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from model.kv_case import ISAS, Case, make_case
from pagemill import _native
from pagemill.kernels.attention_cpu import AttentionBatch, paged_attention
from pagemill.kernels.attention_ref import paged_attention_ref
from pagemill.kernels.batch import SharedBlocks

MIX = [(0, 1), (0, 37), (15, 1), (16, 1), (100, 2), (63, 70), (700, 1), (1300, 5), (511, 3)]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa_name()
    assert _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def run(case: Case, softcap: float | None = None) -> torch.Tensor:
    return paged_attention(case.q, case.storage, 1, case.batch, case.scale, case.window, softcap)


def expected(case: Case, softcap: float | None = None) -> torch.Tensor:
    return paged_attention_ref(
        case.q, case.storage, 1, case.batch, case.scale, case.window, softcap
    )


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """On matrix tiles a float32 is the sum of two bfloat16: 2^-18 of it is lost."""
    near = 4e-5 if _native.isa_name() == "amx" else 1e-5
    torch.testing.assert_close(got, want, rtol=2 * near, atol=near)


@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (1, 1, 16, 16),
        (3, 3, 32, 16),
        (9, 3, 64, 16),
        (4, 1, 256, 16),
        (8, 2, 80, 32),
        (8, 1, 96, 64),
        (14, 2, 64, 128),
        (5, 1, 128, 32),
        (7, 1, 48, 16),
        (71, 1, 64, 16),
    ],
)
def test_equals_the_plain_attention(
    kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(
        MIX,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_format=kv_format,
    )
    want, before = expected(case), _native.isa_name()
    for name in ISAS:
        _native.set_isa(name)
        got = run(case)
        _native.set_isa(before)
        assert_near(got, want)


@pytest.mark.parametrize("window", [1, 16, 30, 64, 100, 600])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
def test_windows(isa: str, kv_format: str, window: int) -> None:
    case = make_case(MIX, num_heads=4, head_dim=64, kv_format=kv_format, window=window)
    assert_near(run(case), expected(case))


def test_softcap(isa: str) -> None:
    case = make_case(MIX, num_heads=4, num_kv_heads=2, head_dim=64)
    case.q *= 20
    assert_near(run(case, 5.0), expected(case, 5.0))
    assert (run(case, 5.0) - run(case)).abs().max() > 0.1


def test_large_scores(isa: str) -> None:
    case = make_case(MIX, num_heads=3, head_dim=64)
    case.q *= 300
    torch.testing.assert_close(run(case), expected(case), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("each", [1, 3])
def test_equals_torch(isa: str, each: int) -> None:
    case = make_case([(300, 40)], num_heads=2 * each, num_kv_heads=2, head_dim=64)
    k, v = (x[0].transpose(0, 1).repeat_interleave(each, 0) for x in (case.keys, case.values))
    visible = torch.ones(40, 340, dtype=torch.bool).tril(300)
    want = scaled_dot_product_attention(case.q.transpose(0, 1), k, v, visible).transpose(0, 1)
    assert_near(run(case), want)


def alone(case: Case, i: int, begin: int, end: int) -> torch.Tensor:
    """Rows [begin, end) of sequence i as a call of their own."""
    ids = case.batch.block_ids[case.batch.indptr[i] : case.batch.indptr[i + 1]]
    batch = AttentionBatch(
        np.array([0, end - begin], np.int32),
        np.array([case.batch.context_start[i] + begin], np.int32),
        ids,
        np.array([0, len(ids)], np.int32),
    )
    first = int(case.batch.query_start[i])
    q = case.q[first + begin : first + end]
    return paged_attention(q, case.storage, 1, batch, case.scale, case.window)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
def test_same_bits_in_any_company(isa: str, kv_format: str, window: int | None) -> None:
    case = make_case(
        [*MIX, (3000, 1), (1000, 100)],
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        kv_format=kv_format,
        window=window,
    )
    whole = run(case)
    assert torch.isfinite(whole).all()
    for i in range(len(case.keys)):
        begin, end = (int(x) for x in case.batch.query_start[i : i + 2])
        for size in (1, 7, 1000):
            for first in range(0, min(end - begin, 20), size):
                last = min(first + size, end - begin)
                got = alone(case, i, first, last)
                assert torch.equal(got, whole[begin + first : begin + last])


def test_same_bits_on_any_number_of_threads(isa: str) -> None:
    case = make_case([(5000, 1), (2000, 60)], num_heads=4, head_dim=64, kv_format="bf16")
    before = _native.num_threads()
    results = []
    for count in (1, 2, 3, 8):
        _native.set_num_threads(count)
        results.append(run(case))
    _native.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_swapped_block_changes_the_output() -> None:
    case = make_case([(100, 1)], head_dim=64)
    before = run(case)
    ids = case.batch.block_ids
    ids[1], ids[2] = ids[2], ids[1]
    torch.testing.assert_close(run(case), before)  # order of blocks in the past: a sum
    ids[1] = ids[3]
    assert (run(case) - before).abs().max() > 1e-2


def test_rows_inside_a_wider_row() -> None:
    case = make_case(MIX, num_heads=4, num_kv_heads=2, head_dim=32)
    wide = torch.randn(case.q.shape[0], 8 * 32)
    wide[:, : 4 * 32] = case.q.flatten(1)
    want = run(case)
    case.q = wide[:, : 4 * 32].view(-1, 4, 32)
    assert torch.equal(run(case), want)


def test_nothing_to_do() -> None:
    case = make_case([(10, 0), (5, 1), (3, 0)])
    assert_near(run(case), expected(case))
    case = make_case([(10, 0)])
    assert run(case).shape == (0, 3, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.block_ids.__setitem__(1, 10_000), "outside of the pool"),
        (lambda b: b.block_ids.__setitem__(1, -1), "outside of the pool"),
        (lambda b: b.context_start.__setitem__(0, 400), "shorter than its sequence"),
        (lambda b: b.context_start.__setitem__(0, -1), "negative"),
        (lambda b: b.query_start.__setitem__(2, 99), "number of tokens"),
        (lambda b: b.query_start.__setitem__(1, -1), "descend"),
        (lambda b: b.indptr.__setitem__(2, 1000), "outside of block_ids"),
        (lambda b: b.indptr.__setitem__(1, 1000), "descend"),
    ],
)
def test_wrong_batches_are_refused(change, words: str) -> None:
    case = make_case([(100, 3), (40, 1)])
    change(case.batch)
    with pytest.raises(ValueError, match=words):
        run(case)


def test_wrong_arrays_are_refused() -> None:
    case = make_case([(100, 3)])
    good = case.q
    for bad, error in [
        (good.double(), TypeError),
        (good[:, :, :16], ValueError),
        (good.transpose(0, 1).contiguous().transpose(0, 1), ValueError),
        (good[0], TypeError),
    ]:
        case.q = bad
        with pytest.raises(error):
            run(case)
    uneven = make_case([(100, 3)], num_heads=5, num_kv_heads=2)
    with pytest.raises(ValueError, match="multiple"):
        run(uneven)


# ---------------------------------------------------------------- shared runs


def shared_case(kv_format: str, head_dim: int = 64) -> tuple[Case, AttentionBatch]:
    """Six sequences: all share 40 blocks, three of them 40 more, then each goes its own way; one
    computes a chunk, one has nothing in common. The same batch with its runs beside."""
    spans = [(1400 + 30 * i, 1) for i in range(5)] + [(1320, 7), (900, 1)]
    case = make_case(spans, num_heads=6, num_kv_heads=2, head_dim=head_dim, kv_format=kv_format)
    ids, indptr = case.batch.block_ids, case.batch.indptr
    for i in range(1, 6):
        ids[indptr[i] : indptr[i] + (80 if i < 3 else 40)] = ids[: 80 if i < 3 else 40]
    shared = SharedBlocks(*(np.array(x, np.int32) for x in (
        [0, 40, 40, 40], [0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 6, 9])))  # fmt: skip
    return case, replace(case.batch, shared=shared)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "i8", "f8", "k8v4"])
def test_shared_runs_give_the_same_bits(isa: str, kv_format: str, head_dim: int) -> None:
    case, batch = shared_case(kv_format, head_dim)
    apart = paged_attention(case.q, case.storage, 1, case.batch, case.scale)
    together = paged_attention(case.q, case.storage, 1, batch, case.scale)
    assert torch.equal(apart, together)
    assert torch.isfinite(together).all()


@pytest.mark.parametrize(
    ("runs", "members", "indptr", "words"),
    [
        ([0, 85], [0, 1], [0, 2], "other blocks"),
        ([0, 900], [0, 1], [0, 2], "longer than a block table"),
        ([-1, 4], [0, 1], [0, 2], "no range"),
        ([0, 4], [0, 7], [0, 2], "not there"),
        ([0, 4], [0, 1], [0, 3], "do not fit"),
        ([0, 4], [0, 1], [0], "need their members"),
    ],
)
def test_shared_runs_that_are_not_shared(
    runs: list[int], members: list[int], indptr: list[int], words: str
) -> None:
    case, batch = shared_case("bf16")
    wrong = SharedBlocks(*(np.array(x, np.int32) for x in (runs, members, indptr)))
    with pytest.raises(ValueError, match=words):
        paged_attention(case.q, case.storage, 1, replace(batch, shared=wrong), case.scale)
