"""Norms of heads and rotary positions, in place: one program a token and head of q or k."""

import triton
import triton.language as tl


@triton.jit
def _norm(low, high, rest, weight, half: tl.constexpr, R: tl.constexpr, D: tl.constexpr, eps,
          i, j, in_half, in_rest):  # fmt: skip
    """Root-mean-square norm of a head that lies in three parts."""
    squares = tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(rest * rest, 0)
    factor = 1.0 / tl.sqrt_rn(squares / D + eps)
    low = low * factor * tl.load(weight + i, mask=in_half, other=0.0)
    high = high * factor * tl.load(weight + half + i, mask=in_half, other=0.0)
    rest = rest * factor * tl.load(weight + R + j, mask=in_rest, other=0.0)
    return low, high, rest


@triton.jit
def rope_kernel(
    qkv, table, positions, q_norm, k_norm, eps, stride,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, H + K). Channels (i, i + R / 2) turn together, those from R on stay."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = R // 2
    x = qkv + token * stride + head * D
    i, j = tl.arange(0, HALF_P), tl.arange(0, REST_P)
    in_half, in_rest = i < half, j < D - R
    low = tl.load(x + i, mask=in_half, other=0.0)
    high = tl.load(x + half + i, mask=in_half, other=0.0)
    rest = tl.load(x + R + j, mask=in_rest, other=0.0)
    if HAS_Q_NORM:
        if head < H:
            low, high, rest = _norm(low, high, rest, q_norm, half, R, D, eps, i, j, in_half,
                                    in_rest)  # fmt: skip
    if HAS_K_NORM:
        if head >= H:
            low, high, rest = _norm(low, high, rest, k_norm, half, R, D, eps, i, j, in_half,
                                    in_rest)  # fmt: skip
    angles = table + tl.load(positions + token).to(tl.int64) * R
    cosine = tl.load(angles + i, mask=in_half, other=0.0)
    sine = tl.load(angles + half + i, mask=in_half, other=0.0)
    tl.store(x + i, low * cosine - high * sine, mask=in_half)
    tl.store(x + half + i, high * cosine + low * sine, mask=in_half)
    tl.store(x + R + j, rest, mask=in_rest)
