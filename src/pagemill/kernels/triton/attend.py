"""Attention over paged KV: one program a row tile, KV head (a part of its query heads) and split.

Softmax in base 2 with a running maximum, sums in float32 (FlashAttention-2, arXiv 2307.08691;
splits and their merge as Flash-Decoding). ``items`` int32 [n, 8]: start in the table, first row,
its position, tokens, first position read, end of those, raw group, partial.
"""

import triton
import triton.language as tl

from pagemill.kernels.triton.numbers import hadamard
from pagemill.kernels.triton.read import (
    raw_group,
    read_keys,
    read_raw_keys,
    read_raw_values,
    read_values,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _product(a, b, acc, HOW: tl.constexpr):
    """``acc`` + ``a`` @ ``b``. two: ``b`` is bf16 without loss, ``a`` two bf16 numbers, so that 16
    of its bits count (wide: the same numbers for the interpreter, which multiplies the bits of
    bf16 as integers); tf32: 11 bits of both; ieee: float32."""
    if HOW == "two" or HOW == "wide":
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        if HOW == "wide":
            acc = tl.dot(low.to(tl.float32), b, acc)
            acc = tl.dot(high.to(tl.float32), b, acc)
        else:
            acc = tl.dot(low, b.to(tl.bfloat16), acc)
            acc = tl.dot(high, b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=HOW)
    return acc


@triton.jit
def _take(
    q, keys, key_factor, values, value_factor, tokens, positions, begin, end, shift, cap, window,
    acc, top, total, HAS_CAP: tl.constexpr, HOW_K: tl.constexpr, HOW_V: tl.constexpr,
):  # fmt: skip
    """One step: ``keys``, ``values`` [N, DP] of ``tokens`` [N] join the sums of rows [M]."""
    is_read = (tokens >= begin) & (tokens < end)
    scores = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
    scores = _product(q, tl.trans(keys), scores, HOW_K) * key_factor[None, :] + shift[:, None]
    if HAS_CAP:
        power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        tanh = (1 - power) / (1 + power)
        scores = tl.where(scores < 0, 0.0 - tanh, tanh) * (cap * LOG2_E)
    visible = is_read[None, :] & (tokens[None, :] <= positions[:, None])
    visible = visible & (tokens[None, :] > positions[:, None] - window)
    scores = tl.where(visible, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    reference = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(scores - reference[:, None])
    keep = tl.exp2(top - reference)
    total = total * keep + tl.sum(weights, 1)
    weights = weights * tl.where(is_read, value_factor, 0.0)[None, :]
    values = tl.where(is_read[:, None], values, 0.0)  # behind the end may be anything, even NaN
    acc = _product(weights, values, acc * keep[:, None], HOW_V)
    return acc, best, total


@triton.jit
def _finish(sinks, heads, is_row, acc, top, total, HAS_SINKS: tl.constexpr):
    """The weighed mean of rows. A sink takes part of the sum of weights and adds no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
        best = tl.maximum(top, sink)
        keep = tl.exp2(top - best)
        acc, total = acc * keep[:, None], total * keep + tl.exp2(sink - best)
    return acc / tl.where(is_row, total, 1.0)[:, None]


@triton.jit
def _take_raw(
    q, raw, first, positions, begin, end, shift, cap, window, acc, top, total,
    D: tl.constexpr, DP: tl.constexpr, HAS_CAP: tl.constexpr, HOW_K: tl.constexpr,
    HOW_V: tl.constexpr,
):  # fmt: skip
    """The step of the rows' own group, from position ``first`` on: bf16 at byte pointer ``raw``."""
    base, valid = tl.zeros((1,), tl.int64), tl.full((1,), True, tl.int1)
    keys = read_raw_keys(raw, base, valid, 1, D, DP)
    values = read_raw_values(raw, base, valid, 1, D, DP)
    ones = tl.full((16,), 1.0, tl.float32)
    tokens = first + tl.arange(0, 16)
    return _take(q, keys, ones, values, ones, tokens, positions, begin, end, shift, cap, window,
                 acc, top, total, HAS_CAP, HOW_K, HOW_V)  # fmt: skip


@triton.jit
def _take_coded(
    q, tiles, table, kv_head, positions, begin, end, shift, cap, window, acc, top, total,
    FORMAT: tl.constexpr, GROUP_BYTES: tl.constexpr, META: tl.constexpr, KEYS: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    NG: tl.constexpr, HAS_CAP: tl.constexpr, HOW_K: tl.constexpr, HOW_V: tl.constexpr,
):  # fmt: skip
    """All steps over the tiles of the positions [begin, end); ``table`` is the sequence's own."""
    for first in range(begin // 16 * 16, end, NG * 16):
        group = first // 16 + tl.arange(0, NG)
        valid = group * 16 < end
        block = tl.load(table + group // GROUPS, mask=valid, other=0).to(tl.int64)
        base = ((block * K + kv_head) * GROUPS + group % GROUPS) * GROUP_BYTES
        keys, key_factor = read_keys(tiles, base, valid, FORMAT, META, NG, D, DP)
        values, value_factor = read_values(tiles, base, valid, FORMAT, META, KEYS, NG, D, DP, P)
        tokens = first + tl.arange(0, NG * 16)
        acc, top, total = _take(q, keys, key_factor, values, value_factor, tokens, positions,
                                begin, end, shift, cap, window, acc, top, total, HAS_CAP, HOW_K,
                                HOW_V)  # fmt: skip
    return acc, top, total


@triton.jit
def attend_kernel(
    q_ptr, q_stride, out, partial_acc, partial_top, partial_sum, tiles, tails, scratch, table,
    items, shifts, sinks, scale, cap, window,
    FORMAT: tl.constexpr, GROUP_BYTES: tl.constexpr, META: tl.constexpr, KEYS: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROTATES_K: tl.constexpr,
    ROTATES_V: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr, TT: tl.constexpr, HB: tl.constexpr,
    NG: tl.constexpr, HOW_K: tl.constexpr, HOW_V: tl.constexpr,
):  # fmt: skip
    """Grid (items, K * ceil(H / K / HB)). Rows: TT tokens by HB heads; NG groups a step."""
    item = items + tl.program_id(0) * 8
    PER_HEAD: tl.constexpr = (H // K + HB - 1) // HB
    kv_head, part = tl.program_id(1) // PER_HEAD, tl.program_id(1) % PER_HEAD
    table += tl.load(item)
    row0, position0, count = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end = tl.load(item + 4), tl.load(item + 5)
    r, d = tl.arange(0, TT * HB), tl.arange(0, DP)
    inner = part * HB + r % HB
    is_row, heads = (r // HB < count) & (inner < H // K), kv_head * (H // K) + inner
    rows, positions = (row0 + r // HB).to(tl.int64), position0 + r // HB
    mask = is_row[:, None] & (d < D)[None, :]
    at = rows[:, None] * q_stride + heads[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    if ROTATES_K:
        q = hadamard(q, TT * HB, DP, LOG, FACTOR)
    unit = scale / cap if HAS_CAP else scale * LOG2_E
    q = q * unit
    shift = tl.zeros((TT * HB,), tl.float32)
    if HAS_SHIFT:
        shift = tl.load(shifts + rows * H + heads, mask=is_row, other=0.0) * unit
    acc = tl.zeros((TT * HB, DP), tl.float32)
    top, total = tl.full((TT * HB,), float("-inf"), tl.float32), tl.zeros((TT * HB,), tl.float32)
    coded_end = tl.minimum(end, position0 // 16 * 16) if FORMAT == "i4c" else end
    acc, top, total = _take_coded(q, tiles, table, kv_head, positions, begin, coded_end, shift,
                                  cap, window, acc, top, total, FORMAT, GROUP_BYTES, META, KEYS,
                                  K, GROUPS, D, DP, P, NG, HAS_CAP, HOW_K, HOW_V)  # fmt: skip
    if FORMAT == "i4c":
        if coded_end < end:
            raw = raw_group(tails, scratch, tl.load(item + 6), kv_head, K, D)
            acc, top, total = _take_raw(q, raw, coded_end, positions, begin, end, shift, cap,
                                        window, acc, top, total, D, DP, HAS_CAP, HOW_K,
                                        HOW_V)  # fmt: skip
    place = tl.load(item + 7).to(tl.int64) * H + heads
    if IS_SPLIT:
        tl.store(partial_top + place, top, mask=is_row)
        tl.store(partial_sum + place, total, mask=is_row)
        tl.store(partial_acc + place[:, None] * D + d[None, :], acc, mask=mask)
    else:
        result = _finish(sinks, heads, is_row, acc, top, total, HAS_SINKS)
        if ROTATES_V:
            result = hadamard(result, TT * HB, DP, LOG, FACTOR)
        tl.store(out + (rows * H + heads)[:, None] * D + d[None, :], result, mask=mask)


@triton.jit
def merge_kernel(
    partial_acc, partial_top, partial_sum, merges, out, sinks, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, ROTATES_V: tl.constexpr,
    HAS_SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (merges, H): the partials of a row's splits joined."""
    merge, head = merges + tl.program_id(0) * 4, tl.program_id(1)
    first, count, row = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2).to(tl.int64)
    d = tl.arange(0, DP)
    acc, total = tl.zeros((1, DP), tl.float32), tl.zeros((1,), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for start in range(0, count, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        is_there = split < count
        place = (first + split).to(tl.int64) * H + head
        tops = tl.load(partial_top + place, mask=is_there, other=float("-inf"))
        sums = tl.load(partial_sum + place, mask=is_there, other=0.0)
        part = tl.load(partial_acc + place[:, None] * D + d[None, :],
                       mask=is_there[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
        best = tl.maximum(top, tl.max(tops, 0))
        take, keep = tl.exp2(tops - best), tl.exp2(top - best)
        total = total * keep + tl.sum(sums * take, 0)
        acc = acc * keep[:, None] + tl.sum(part * take[:, None], 0)[None, :]
        top = best
    one = tl.arange(0, 1)
    result = _finish(sinks, head + one, one == 0, acc, top, total, HAS_SINKS)
    if ROTATES_V:
        result = hadamard(result, 1, DP, LOG, FACTOR)
    tl.store(out + (row * H + head) * D + d[None, :], result, mask=(d < D)[None, :])
