"""4-bit codes, inside the writing kernels: V of tokens in planes of channels, K of whole groups.

Three scales are tried and the one with the smallest squared error is taken; codec.py says how.
Sums have codec.py's order: a sum over one number and zeros is that number, and two numbers have
one sum, however a device reduces.
"""

import triton
import triton.language as tl

from pagemill.kernels.triton.numbers import (
    clamped,
    f16_of_bits,
    is_finite,
    rounded,
    scale_byte,
    scale_of_byte,
    to_f16_bits,
)

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _code(x, low, scale):
    offset = x - low
    return rounded(clamped(tl.div_rn(offset, scale + tl.zeros_like(x)), 0.0, 15.0))


@triton.jit
def _f16(x):
    """Bits of fp16, cut to its finite numbers, and what they stand for."""
    bits = to_f16_bits(clamped(x, -65504.0, 65504.0), x == x)
    return bits, f16_of_bits(bits)


@triton.jit
def _tree_sum(x, P: tl.constexpr, W: tl.constexpr):
    """[16, P, W] to [16, P]: 16 sums, every 16th each, and these by halves."""
    parts = tl.reshape(x, (16, P, W // 16, 16))
    part = tl.arange(0, W // 16)[None, None, :, None]
    total = tl.zeros((16, P, 16), tl.float32)
    for i in tl.static_range(W // 16):
        total += tl.sum(tl.where(part == i, parts, 0.0), 2)
    for i in tl.static_range(4):
        total = tl.sum(tl.reshape(total, (16, P, 2, 8 >> i)), 2)
    return tl.reshape(total, (16, P))


@triton.jit
def _row_sum(x, DP: tl.constexpr):
    """[16, DP] to [DP], one token after the other."""
    lane = tl.arange(0, 16)[:, None]
    total = tl.zeros((DP,), tl.float32)
    for t in tl.static_range(16):
        total += tl.sum(tl.where(lane == t, x, 0.0), 0)
    return total


@triton.jit
def _try_plane(
    x, is_used, count, middle, step, FACTOR: tl.constexpr, P: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Squared error [16, P], and bits of scale and minimum, of one scale."""
    scale_bits, scale = _f16(tl.minimum(step * FACTOR, 65504.0))
    used, wide = tl.where(scale > 0, scale, 1.0)[:, :, None], scale[:, :, None]
    start = middle[:, :, None] - 7.5 * used
    code = tl.where(wide > 0, _code(x, start, used), 0.0)
    rest = _tree_sum(tl.where(is_used, x - code * wide, 0.0), P, W)
    low_bits, low = _f16(tl.div_rn(rest, count + tl.zeros_like(rest)) + 0.0)
    code = tl.where(wide > 0, _code(x, low[:, :, None], used), 0.0)
    error = code * wide + low[:, :, None] - x
    return _tree_sum(tl.where(is_used, error * error, 0.0), P, W), scale_bits, low_bits


@triton.jit
def put_values4(
    meta, ptr, v, first, end, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """V of 4 bits, with a scale and a minimum for each token and plane; lanes [first, end)."""
    W: tl.constexpr = DP // P
    lane, plane = tl.arange(0, 16), tl.arange(0, P)
    is_used = (plane[:, None] * W + tl.arange(0, W)[None, :] < D)[None, :, :]
    x = tl.reshape(v, (16, P, W))
    finite = tl.min((is_finite(x) | ~is_used).to(tl.int32), 2) > 0
    x = tl.where(finite[:, :, None] & is_used, x, 0.0)
    low = tl.min(tl.where(is_used, x, LARGEST), 2) + 0.0
    high = tl.max(tl.where(is_used, x, -LARGEST), 2) + 0.0
    middle, step = (low + high) * 0.5, tl.div_rn(high - low, tl.zeros_like(low) + 15.0)
    count = tl.minimum(tl.maximum(D - plane * W, 1), W).to(tl.float32)[None, :]
    least, scale_bits, low_bits = _try_plane(x, is_used, count, middle, step, 1.0, P, W)
    for i in tl.static_range(2):
        error, scale, start = _try_plane(x, is_used, count, middle, step, 0.9375 - i * 0.0625, P, W)
        wins = error < least
        least, scale_bits = tl.where(wins, error, least), tl.where(wins, scale, scale_bits)
        low_bits = tl.where(wins, start, low_bits)
    scale_bits = tl.where(finite, scale_bits, 0x7E00).to(tl.int16)
    low_bits = tl.where(finite, low_bits, 0).to(tl.int16)
    at = plane[None, :] * 32 + lane[:, None]
    is_there = ((lane >= first) & (lane < end))[:, None] & (plane * W < D)[None, :]
    line = meta.to(tl.pointer_type(tl.int16)) + at
    tl.store(line, scale_bits, mask=is_there)
    tl.store(line + 16, low_bits, mask=is_there)
    wide = f16_of_bits(scale_bits)[:, :, None]
    code = _code(x, f16_of_bits(low_bits)[:, :, None], tl.where(wide > 0, wide, 1.0))
    codes = tl.where(wide > 0, code, 0.0).to(tl.int32)
    _put_nibbles(ptr, tl.reshape(codes, (16, DP)), first, end, D, DP)


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
def _try_channels(x, middle, byte, DP: tl.constexpr):
    """Squared error [DP] and bits of the minimum of one scale byte a channel."""
    scale = scale_of_byte(byte)
    start = middle - 7.5 * scale
    code = _code(x, start[None, :], scale[None, :])
    low_bits, low = _f16(_row_sum(x - code * scale[None, :], DP) * 0.0625 + 0.0)
    code = _code(x, low[None, :], scale[None, :])
    error = code * scale[None, :] + low[None, :] - x
    return _row_sum(error * error, DP), low_bits


@triton.jit
def put_keys4(meta, ptr, k, D: tl.constexpr, DP: tl.constexpr):
    """Keys of a whole group in 4 bits, with a scale and a minimum for each channel."""
    d = tl.arange(0, DP)
    finite = tl.min(is_finite(k).to(tl.int32), 0) > 0
    x = tl.where(finite[None, :], k, 0.0)
    low, high = tl.min(x, 0) + 0.0, tl.max(x, 0) + 0.0
    middle, byte = (low + high) * 0.5, scale_byte(tl.div_rn(high - low, tl.zeros_like(low) + 15.0))
    largest = byte
    least, low_bits = _try_channels(x, middle, byte, DP)
    for i in tl.static_range(2):
        smaller = tl.maximum(largest - (i + 1), 0)
        error, start = _try_channels(x, middle, smaller, DP)
        wins = error < least
        least, byte = tl.where(wins, error, least), tl.where(wins, smaller, byte)
        low_bits = tl.where(wins, start, low_bits)
    tl.store(meta + d, byte.to(tl.uint8), mask=d < D)
    kept = tl.where(finite, low_bits, 0x7E00).to(tl.int16)
    tl.store((meta + D).to(tl.pointer_type(tl.int16)) + d, kept, mask=d < D)
    pad: tl.constexpr = (3 * D + 63) // 64 * 64 - 3 * D
    tl.store(meta + 3 * D + tl.arange(0, 64), tl.zeros((64,), tl.uint8),
             mask=tl.arange(0, 64) < pad)  # fmt: skip
    code = _code(x, f16_of_bits(low_bits)[None, :], scale_of_byte(byte)[None, :])
    codes = tl.where(finite[None, :], code, 0.0).to(tl.int32)
    pairs = tl.permute(tl.reshape(codes, (16, DP // 8, 2, 4)), (0, 1, 3, 2))
    even, odd = tl.split(pairs)
    packed = tl.reshape(even | (odd << 4), (16, DP // 2)).to(tl.uint8)
    i, lane = tl.arange(0, DP // 2)[None, :], tl.arange(0, 16)[:, None]
    tl.store(ptr + i // 4 * 64 + lane * 4 + i % 4, packed, mask=(i * 2 < D) & (lane >= 0))
