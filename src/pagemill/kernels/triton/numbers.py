"""Bits of numbers, inside Triton kernels: made so that every device finds those of codec.py.

Conversions whose rounding or NaN differ between devices are spelled out on the bits; divisions are
the exactly rounded ones. Kernels that write are compiled without fused multiply-adds.
"""

import triton
import triton.language as tl


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr):
    """``x`` float32 [ROWS, DIM] in blocks of 2^LOG channels; the order of sums is codec.py's."""
    for step in tl.static_range(LOG):
        pairs = tl.reshape(x, (ROWS, DIM // (2 << step), 2, 1 << step))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        x = tl.reshape(joined, (ROWS, DIM))
    return x * FACTOR


@triton.jit
def is_finite(x):
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def to_f16_bits(x, is_usable):
    """int16 bits of fp16, the one NaN 0x7e00 where not usable."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(is_usable, bits, 0x7E00).to(tl.int16)


@triton.jit
def f16_of_bits(bits):
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def to_bf16_bits(x):
    """int16 bits of bf16, to nearest, ties to even; a NaN keeps its upper bits, made quiet."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.int16)


@triton.jit
def bf16_of_bits(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """Codes of float32 of magnitude up to 448 as int32, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = tl.minimum((rounded - (120 << 23)) >> 20, 0x7E)
    return sign | tl.where(size < 0x3C800000, small, normal)


@triton.jit
def from_e4m3(code):
    """float32 of codes int32 in 0..255."""
    size, sign = (code & 0x7F) << 20, (code & 0x80) << 24
    small = (size | (121 << 23)).to(tl.float32, bitcast=True) - 0.015625
    normal = (size + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << 23), small, normal)
    return tl.where(sign != 0, -value, value)


@triton.jit
def scale_byte(x):
    """The smallest scale byte that is not below x >= 0: codec.py's ``_scale_byte``, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    byte = ((bits + ((1 << 19) - 1)) >> 19) - (116 << 4)
    return tl.minimum(tl.maximum(byte, 0), 255)


@triton.jit
def scale_of_byte(byte):
    return ((byte.to(tl.int32) + (116 << 4)) << 19).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """To the nearest integer, ties to even; magnitudes under 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def divided(x, scale):
    """x / scale, 0 where the scale is 0 or NaN."""
    is_usable = scale > 0
    quotient = tl.div_rn(x, tl.where(is_usable, scale, 1.0) + tl.zeros_like(x))
    return tl.where(is_usable, quotient, 0.0)


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)
