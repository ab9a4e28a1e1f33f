"""Storing K and V of a step, in every format: one program a token group and KV head.

A program takes the tokens of the step that fall into its group, so no two write the same byte.
``items`` int32 [n, 8]: first row, first lane, end lane, block, group of the block, raw group,
tail slot, 0; the lanes [first, end) of the group are new. A raw group r >= 0 is tail slot r, r < 0
the scratch's group -1 - r (``plan.py``).
"""

import triton
import triton.language as tl

from pagemill.kernels.triton.codes4 import put_keys4, put_values4
from pagemill.kernels.triton.numbers import (
    bf16_of_bits,
    clamped,
    divided,
    f16_of_bits,
    hadamard,
    is_finite,
    rounded,
    to_bf16_bits,
    to_e4m3,
    to_f16_bits,
)
from pagemill.kernels.triton.read import raw_group


@triton.jit
def _put(ptr, x, mask, C: tl.constexpr, DP: tl.constexpr, IS_VALUE: tl.constexpr):
    """``x`` [16, DP] as K [D / C][16][C] or V [D / 16][16 / C][16][C] of ``ptr``'s elements."""
    lane, d = tl.arange(0, 16)[:, None], tl.arange(0, DP)[None, :]
    if IS_VALUE:
        at = d // 16 * 256 + lane // C * (16 * C) + d % 16 * C + lane % C
    else:
        at = d // C * (16 * C) + lane * C + d % C
    tl.store(ptr + at, x, mask=mask)


@triton.jit
def _put_raw(ptr, keys, values, mask, D: tl.constexpr, DP: tl.constexpr):
    """bf16 bits int16 [16, DP] of K and V from byte pointer ``ptr`` on."""
    raw = ptr.to(tl.pointer_type(tl.int16))
    _put(raw, keys, mask, 2, DP, False)
    _put(raw + 16 * D, values, mask, 2, DP, True)


@triton.jit
def _scales8(x, LARGEST: tl.constexpr):
    """Bits of fp16 scales of rows, and the scales as float32."""
    finite = tl.min(is_finite(x).to(tl.int32), 1) > 0
    top = tl.max(tl.where(finite[:, None], tl.abs(x), 0.0), 1)
    scale = tl.minimum(tl.div_rn(top, tl.zeros_like(top) + LARGEST), 65504.0)
    bits = to_f16_bits(scale, finite)
    return bits, f16_of_bits(bits)


@triton.jit
def _put8(meta, ptr, x, mask, is_new, FORMAT: tl.constexpr, DP: tl.constexpr,
          IS_VALUE: tl.constexpr):  # fmt: skip
    """Codes of 8 bits, with a scale a token."""
    if FORMAT == "f8":
        bits, scale = _scales8(x, 448.0)
        codes = to_e4m3(clamped(divided(x, scale[:, None]), -448.0, 448.0))
    else:
        bits, scale = _scales8(x, 127.0)
        codes = rounded(clamped(divided(x, scale[:, None]), -127.0, 127.0)).to(tl.int32)
        codes = codes & 255 if IS_VALUE else codes + 128
    tl.store(meta.to(tl.pointer_type(tl.int16)) + tl.arange(0, 16), bits, mask=is_new)
    _put(ptr, codes.to(tl.uint8), mask, 4, DP, IS_VALUE)


@triton.jit
def _put_tokens(
    group, k, v, mask, is_new, first, end, FORMAT: tl.constexpr, META: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The new tokens of a group, in the formats whose tokens are coded one by one."""
    keys, values = group + META, group + META + KEYS
    if FORMAT == "fp32":
        _put(keys.to(tl.pointer_type(tl.float32)), k, mask, 1, DP, False)
        _put(values.to(tl.pointer_type(tl.float32)), v, mask, 1, DP, True)
    elif FORMAT == "bf16":
        _put_raw(group, to_bf16_bits(k), to_bf16_bits(v), mask, D, DP)
    else:
        _put8(group, keys, k, mask, is_new, FORMAT, DP, False)
        if FORMAT == "k8v4":
            tl.store(group + 32 + tl.arange(0, 32), tl.zeros((32,), tl.uint8))
            put_values4(group + 64, values, v, first, end, D, DP, P)
        else:
            _put8(group + 32, values, v, mask, is_new, FORMAT, DP, True)


@triton.jit
def _merge_old(new, old_ptr, lane, first, D: tl.constexpr, DP: tl.constexpr,
               IS_VALUE: tl.constexpr):  # fmt: skip
    """bf16 bits [16, DP] with the lanes before ``first`` out of a raw group."""
    d = tl.arange(0, DP)[None, :]
    if IS_VALUE:
        at = d // 16 * 256 + lane // 2 * 32 + d % 16 * 2 + lane % 2
    else:
        at = d // 2 * 32 + lane * 2 + d % 2
    is_old = lane < first
    old = tl.load(old_ptr.to(tl.pointer_type(tl.int16)) + at, mask=is_old & (d < D), other=0)
    return tl.where(is_old, old, new)


@triton.jit
def _put_raw_group(
    group, tails, scratch, raw, tail, k, v, first, end, head, NUM_HEADS: tl.constexpr,
    META: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The new tokens of a group into its raw group; all of it is coded once it is whole."""
    lane = tl.arange(0, 16)[:, None]
    old = tails + (tail.to(tl.int64) * NUM_HEADS + head) * (64 * D)
    keys = _merge_old(to_bf16_bits(k), old, lane, first, D, DP, False)
    values = _merge_old(to_bf16_bits(v), old + 32 * D, lane, first, D, DP, True)
    mask = (lane < end) & (tl.arange(0, DP) < D)[None, :]
    _put_raw(raw_group(tails, scratch, raw, head, NUM_HEADS, D), keys, values, mask, D, DP)
    if end == 16:
        put_keys4(group, group + META, bf16_of_bits(keys), D, DP)
        before: tl.constexpr = (3 * D + 63) // 64 * 64
        put_values4(group + before, group + META + KEYS, bf16_of_bits(values), 0, 16, D, DP, P)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, k_stride, v_stride, centers, tiles, tails, scratch, items,
    FORMAT: tl.constexpr, GROUP_BYTES: tl.constexpr, META: tl.constexpr, KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, HAS_CENTERS: tl.constexpr,
    ROTATES_K: tl.constexpr, ROTATES_V: tl.constexpr,
):  # fmt: skip
    """Grid (items, KV heads). ``k_ptr``, ``v_ptr`` float32, rows of [K, D] ``stride`` apart."""
    item, head = items + tl.program_id(0) * 8, tl.program_id(1)
    row, first, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    block, part = tl.load(item + 3).to(tl.int64), tl.load(item + 4)
    lane, d = tl.arange(0, 16), tl.arange(0, DP)
    is_new = (lane >= first) & (lane < end)
    mask = is_new[:, None] & (d < D)[None, :]
    rows = (row + lane - first).to(tl.int64)[:, None]
    k = tl.load(k_ptr + rows * k_stride + head * D + d[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + rows * v_stride + head * D + d[None, :], mask=mask, other=0.0)
    if HAS_CENTERS:
        center = tl.load(centers + head * D + d, mask=d < D, other=0.0)
        k = tl.where(is_new[:, None], k - center[None, :], 0.0)
    if ROTATES_K:
        k = hadamard(k, 16, DP, LOG, FACTOR)
    if ROTATES_V:
        v = hadamard(v, 16, DP, LOG, FACTOR)
    group = tiles + ((block * NUM_HEADS + head) * GROUPS + part) * GROUP_BYTES
    if FORMAT == "i4c":
        raw, tail = tl.load(item + 5), tl.load(item + 6)
        _put_raw_group(group, tails, scratch, raw, tail, k, v, first, end, head, NUM_HEADS,
                       META, KEYS, D, DP, P)  # fmt: skip
    else:
        _put_tokens(group, k, v, mask, is_new, first, end, FORMAT, META, KEYS, D, DP, P)
