"""Storing K and V of a step, in every format: one program a token group and KV head.

A program takes the tokens of the step that fall into its group, so no two write the same byte.
``items`` int32 [n, 8]: first row, first lane, end lane, block, group of the block, raw group,
tail slot, 0; the lanes [first, end) of the group are new. A raw group r >= 0 is tail slot r, r < 0
the scratch's group -1 - r (``plan.py``).
"""

import triton
import triton.language as tl

from pagemill.kernels.triton.numbers import (
    bf16_of_bits,
    clamped,
    divided,
    f16_of_bits,
    hadamard,
    is_finite,
    rounded,
    scale_byte,
    scale_of_byte,
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
def _range(x, usable, is_used, AXIS: tl.constexpr):
    """fp16 bits of the minimum and the maximum of ``x`` over the used numbers of an axis."""
    low = tl.min(tl.where(usable & is_used, x, 3.4028234663852886e38), AXIS) + 0.0
    high = tl.max(tl.where(usable & is_used, x, -3.4028234663852886e38), AXIS)
    bits = to_f16_bits(clamped(low, -65504.0, 65504.0), low == low)
    return bits, high


@triton.jit
def _put_values4(
    meta, ptr, v, first, end, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """V of 4 bits, with a scale and a minimum for each token and plane; lanes [first, end)."""
    lane = tl.arange(0, 16)
    is_new = (lane >= first) & (lane < end)
    x = tl.reshape(v, (16, P, DP // P))
    channel = tl.arange(0, P)[:, None] * (DP // P) + tl.arange(0, DP // P)[None, :]
    is_used = (channel < D)[None, :, :]
    finite = tl.min((is_finite(x) | ~is_used).to(tl.int32), 2) > 0
    low_bits, high = _range(x, finite[:, :, None], is_used, 2)
    low_bits = tl.where(finite, low_bits, 0).to(tl.int16)
    low = f16_of_bits(low_bits)
    step = tl.div_rn(high - low, tl.zeros_like(low) + 15.0) + 0.0
    scale_bits = to_f16_bits(clamped(step, 0.0, 65504.0), finite)
    at = tl.arange(0, P)[None, :] * 32 + lane[:, None]
    is_there = is_new[:, None] & (tl.arange(0, P) * 64 < D)[None, :]
    line = meta.to(tl.pointer_type(tl.int16)) + at
    tl.store(line, scale_bits, mask=is_there)
    tl.store(line + 16, low_bits, mask=is_there)
    offset = x - low[:, :, None]
    codes = rounded(clamped(divided(offset, f16_of_bits(scale_bits)[:, :, None]), 0.0, 15.0))
    _put_nibbles(ptr, tl.reshape(codes.to(tl.int32), (16, DP)), first, end, D, DP)


@triton.jit
def _put_nibbles(ptr, codes, first, end, D: tl.constexpr, DP: tl.constexpr):
    """Codes int32 [16, DP]: token t < 8 in the low half of a byte, t + 8 in the high one."""
    low, high = tl.split(tl.permute(tl.reshape(codes, (2, 8, DP)), (1, 2, 0)))
    t, d = tl.arange(0, 8)[:, None], tl.arange(0, DP)[None, :]
    has_low, has_high = (t >= first) & (t < end), (t + 8 >= first) & (t + 8 < end)
    mask = (has_low | has_high) & (d < D)
    at = ptr + d // 16 * 128 + t // 4 * 64 + d % 16 * 4 + t % 4
    old = tl.load(at, mask=mask, other=0).to(tl.int32)
    byte = tl.where(has_low, low, old & 15) | (tl.where(has_high, high, old >> 4) << 4)
    tl.store(at, byte.to(tl.uint8), mask=mask)


@triton.jit
def _put_keys4(meta, ptr, k, D: tl.constexpr, DP: tl.constexpr):
    """Keys of a whole group in 4 bits, with a scale and a minimum for each channel."""
    d = tl.arange(0, DP)
    finite = tl.min(is_finite(k).to(tl.int32), 0) > 0
    low_bits, high = _range(k, finite[None, :], tl.full((16, DP), True, tl.int1), 0)
    low = f16_of_bits(low_bits)
    spread = tl.div_rn(high - low, tl.zeros_like(low) + 15.0)
    byte = scale_byte(clamped(tl.where(finite, spread, 0.0), 0.0, 1e30))
    tl.store(meta + d, byte.to(tl.uint8), mask=d < D)
    low_bits = tl.where(finite, low_bits, 0x7E00).to(tl.int16)
    tl.store((meta + D).to(tl.pointer_type(tl.int16)) + d, low_bits, mask=d < D)
    pad: tl.constexpr = (3 * D + 63) // 64 * 64 - 3 * D
    tl.store(meta + 3 * D + tl.arange(0, 64), tl.zeros((64,), tl.uint8),
             mask=tl.arange(0, 64) < pad)  # fmt: skip
    offset = tl.where(finite[None, :], k - low[None, :], 0.0)
    scale = scale_of_byte(byte)[None, :] + tl.zeros_like(offset)
    codes = rounded(clamped(tl.div_rn(offset, scale), 0.0, 15.0)).to(tl.int32)
    pairs = tl.permute(tl.reshape(codes, (16, DP // 8, 2, 4)), (0, 1, 3, 2))
    even, odd = tl.split(pairs)
    packed = tl.reshape(even | (odd << 4), (16, DP // 2)).to(tl.uint8)
    i, lane = tl.arange(0, DP // 2)[None, :], tl.arange(0, 16)[:, None]
    tl.store(ptr + i // 4 * 64 + lane * 4 + i % 4, packed, mask=(i * 2 < D) & (lane >= 0))


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
            _put_values4(group + 64, values, v, first, end, D, DP, P)
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
        _put_keys4(group, group + META, bf16_of_bits(keys), D, DP)
        before: tl.constexpr = (3 * D + 63) // 64 * 64
        _put_values4(group + before, group + META + KEYS, bf16_of_bits(values), 0, 16, D, DP, P)


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
