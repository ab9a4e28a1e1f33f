"""K and V of token groups out of their bytes, inside Triton kernels. codec.py says what they mean.

``base`` int64 [G] are byte offsets of G groups of one head, ``valid`` [G] says which exist. Bytes
are loaded as they lie, so that neighbouring lanes read neighbouring bytes, and ordered afterwards.
Results are [16 G, DP] with DP = D padded to a power of two; what lies beyond D is 0. A factor per
token that all channels share is given apart, to be applied to scores and weights.
"""

import triton
import triton.language as tl

from pagemill.kernels.triton.numbers import bf16_of_bits, f16_of_bits, from_e4m3, scale_of_byte


@triton.jit
def raw_group(tails, scratch, index, head, NUM_HEADS: tl.constexpr, D: tl.constexpr):
    """Where a head's raw group lies: byte pointer."""
    place = tl.where(index >= 0, index, -1 - index).to(tl.int64)
    ptr = tails
    if index < 0:
        ptr = scratch
    return ptr + (place * NUM_HEADS + head) * (64 * D)


@triton.jit
def _flat(ptr, base, valid, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The first COUNT elements of each group: [G, PADDED]. ``base`` counts elements of ``ptr``."""
    i = tl.arange(0, PADDED)
    return tl.load(
        ptr + base[:, None] + i[None, :], mask=valid[:, None] & (i < COUNT)[None, :], other=0
    )


@triton.jit
def _keys(flat, G: tl.constexpr, DP: tl.constexpr, C: tl.constexpr):
    """[D / C][16 tokens][C] of each group to [16 G, DP]."""
    x = tl.reshape(flat, (G, DP // C, 16, C))
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), (G * 16, DP))


@triton.jit
def _values(flat, G: tl.constexpr, DP: tl.constexpr, C: tl.constexpr):
    """[D / 16][16 / C][16 channels][C tokens] of each group to [16 G, DP]."""
    x = tl.reshape(flat, (G, DP // 16, 16 // C, 16, C))
    return tl.reshape(tl.permute(x, (0, 2, 4, 1, 3)), (G * 16, DP))


@triton.jit
def _halves(tiles, base, valid, G: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """COUNT fp16 numbers of each group as float32 [G, PADDED]."""
    bits = _flat(tiles.to(tl.pointer_type(tl.int16)), base // 2, valid, COUNT, PADDED)
    return f16_of_bits(bits)


@triton.jit
def _per_token(tiles, base, valid, G: tl.constexpr):
    return tl.reshape(_halves(tiles, base, valid, G, 16, 16), (G * 16,))


@triton.jit
def read_raw_keys(tiles, base, valid, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """bf16 keys as float32."""
    flat = _flat(tiles.to(tl.pointer_type(tl.int16)), base // 2, valid, 16 * D, 16 * DP)
    return bf16_of_bits(_keys(flat, G, DP, 2))


@triton.jit
def read_raw_values(tiles, base, valid, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """bf16 values as float32; ``base`` is where the keys begin."""
    first = base // 2 + 16 * D
    flat = _flat(tiles.to(tl.pointer_type(tl.int16)), first, valid, 16 * D, 16 * DP)
    return bf16_of_bits(_values(flat, G, DP, 2))


@triton.jit
def read_keys(
    tiles, base, valid, FORMAT: tl.constexpr, META: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Keys float32 [16 G, DP] and their factor [16 G]. META: bytes before the keys."""
    factor = tl.full((G * 16,), 1.0, tl.float32)
    if FORMAT == "fp32":
        first = (base + META) // 4
        flat = _flat(tiles.to(tl.pointer_type(tl.float32)), first, valid, 16 * D, 16 * DP)
        keys = _keys(flat, G, DP, 1)
    elif FORMAT == "bf16":
        keys = read_raw_keys(tiles, base, valid, G, D, DP)
    elif FORMAT == "i4c":
        packed = _flat(tiles, base + META, valid, 8 * D, 8 * DP).to(tl.int32)
        packed = tl.reshape(packed, (G, DP // 8, 16, 4))
        codes = tl.join(packed & 15, packed >> 4)  # [G, DP / 8, 16 tokens, 4, low and high]
        codes = tl.reshape(tl.permute(codes, (0, 2, 1, 4, 3)), (G, 16, DP))
        scale = scale_of_byte(_flat(tiles, base, valid, D, DP))
        low = _halves(tiles, base + D, valid, G, D, DP)
        keys = codes.to(tl.float32) * scale[:, None, :] + low[:, None, :]
        keys = tl.where((tl.arange(0, DP) < D)[None, None, :], keys, 0.0)
        keys = tl.reshape(keys, (G * 16, DP))
    else:
        codes = _keys(_flat(tiles, base + META, valid, 16 * D, 16 * DP), G, DP, 4).to(tl.int32)
        if FORMAT == "f8":
            keys = from_e4m3(codes)
        else:
            keys = tl.where((tl.arange(0, DP) < D)[None, :], codes - 128, 0).to(tl.float32)
        factor = _per_token(tiles, base, valid, G)
    return keys, factor


@triton.jit
def _values4(
    tiles, base, valid, META: tl.constexpr, BEFORE: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """V of 4 bits in P planes of up to 64 channels; their metadata begins at byte BEFORE."""
    packed = _flat(tiles, base + META, valid, 8 * D, 8 * DP).to(tl.int32)
    packed = tl.reshape(packed, (G, DP // 16, 2, 16, 4))
    codes = tl.join(packed & 15, packed >> 4)  # quads j and j + 2 of tokens
    codes = tl.permute(codes, (0, 5, 2, 4, 1, 3))
    codes = tl.reshape(codes, (G, 16, P, DP // P)).to(tl.float32)
    meta = _halves(tiles, base + BEFORE, valid, G, (D + 63) // 64 * 32, P * 32)
    scale, low = tl.split(tl.permute(tl.reshape(meta, (G, P, 2, 16)), (0, 3, 1, 2)))
    values = codes * scale[:, :, :, None] + low[:, :, :, None]
    values = tl.reshape(values, (G * 16, DP))
    return tl.where((tl.arange(0, DP) < D)[None, :], values, 0.0)


@triton.jit
def read_values(
    tiles, base, valid, FORMAT: tl.constexpr, META: tl.constexpr, KEYS: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Values float32 [16 G, DP] and their factor [16 G]. META, KEYS: bytes before, and of keys."""
    factor = tl.full((G * 16,), 1.0, tl.float32)
    if FORMAT == "fp32":
        first = (base + META + KEYS) // 4
        flat = _flat(tiles.to(tl.pointer_type(tl.float32)), first, valid, 16 * D, 16 * DP)
        values = _values(flat, G, DP, 1)
    elif FORMAT == "bf16":
        values = read_raw_values(tiles, base, valid, G, D, DP)
    elif FORMAT == "k8v4":
        values = _values4(tiles, base, valid, META + KEYS, 64, G, D, DP, P)
    elif FORMAT == "i4c":
        before: tl.constexpr = (3 * D + 63) // 64 * 64
        values = _values4(tiles, base, valid, META + KEYS, before, G, D, DP, P)
    else:
        flat = _flat(tiles, base + META + KEYS, valid, 16 * D, 16 * DP)
        codes = _values(flat, G, DP, 4).to(tl.int32)
        if FORMAT == "f8":
            values = from_e4m3(codes)
        else:
            values = (codes - ((codes & 128) << 1)).to(tl.float32)
        factor = _per_token(tiles, base + 32, valid, G)
    return values, factor
