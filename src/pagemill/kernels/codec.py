"""What the bytes of a token group mean in each KV format: slow and plain, the measure of the rest.

A token group is 16 tokens of one KV head: K [16, D] and V [16, D]. Bytes in memory order, metadata
first, each part padded to lines of 64 bytes (P planes of 64 channels: ceil(D / 64)):

    fp32   K [D][16 tokens]                 V [D / 16][16 tokens][16 channels]
    bf16   K [D / 2][16 tokens][2]          V [D / 16][8 token pairs][16 channels][2 tokens]
    i8     16 fp16 scales of K, 16 of V |   K u8 [D / 4][16 tokens][4], code + 128
                                            V s8 [D / 16][4 quads][16 channels][4 tokens]
    f8     as i8, codes e4m3 of both
    k8v4   16 fp16 scales of K | V: P lines of 16 fp16 scales, 16 fp16 minima | K as i8
                                            V u4 [D / 16][2][16 channels][4]: line j holds quad j of
                                            tokens in the low halves, quad j + 2 in the high ones
    i4c    K: D bytes of scale, D fp16 minima | V as k8v4
                                            K u4 [D / 8][16 tokens][4]: channel c low, c + 4 high

i8 and k8v4 take K rotated by a Hadamard matrix, i8, k8v4 and i4c V too: the caller rotates. A scale
comes from the values it codes, of one token (i4c keys: one channel of 16 tokens). A scale byte is
4 bits of exponent and 4 of mantissa, 2^-11 to 31. KIVI (arXiv 2402.02750) coded K by
channel first; the order inside the lines suits u8 x s8 dot products of 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.core.layers import TOKEN_GROUP

_PLANE = 64  # channels of V that share a scale in k8v4 and i4c
_LINE = 64
_F16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Sizes of a format and what it asks of its caller. Bytes are those of one head's group."""

    name: str
    meta_bytes: Callable[[int], int]
    k_bytes: Callable[[int], int]
    v_bytes: Callable[[int], int]
    rotates_k: bool = False
    rotates_v: bool = False
    codes_whole_groups: bool = False
    """A group is coded once, when its 16th token is known; until then it is kept raw in bf16."""

    def group_bytes(self, head_dim: int) -> int:
        """Bytes of a token group of one head."""
        return self.meta_bytes(head_dim) + self.k_bytes(head_dim) + self.v_bytes(head_dim)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _planes(dim: int) -> int:
    return -(-dim // _PLANE)


FORMATS = {
    each.name: each
    for each in (
        KvFormat("fp32", lambda d: 0, lambda d: 64 * d, lambda d: 64 * d),
        KvFormat("bf16", lambda d: 0, lambda d: 32 * d, lambda d: 32 * d),
        KvFormat("i8", lambda d: 64, lambda d: 16 * d, lambda d: 16 * d, True, True),
        KvFormat("f8", lambda d: 64, lambda d: 16 * d, lambda d: 16 * d),
        KvFormat(
            "k8v4", lambda d: 64 + 64 * _planes(d), lambda d: 16 * d, lambda d: 8 * d, True, True
        ),
        KvFormat(
            "i4c",
            lambda d: _lines(3 * d) + 64 * _planes(d),
            lambda d: 8 * d,
            lambda d: 8 * d,
            rotates_v=True,
            codes_whole_groups=True,
        ),
    )
}
"""Every KV format by name."""


def hadamard(x: Tensor) -> Tensor:
    """The rows of ``x`` [..., D] times the normalized Walsh-Hadamard matrix, in float32, in blocks
    of the largest power of two that divides D. Its own inverse, up to rounding. The sums are made
    in a fixed order, so that every implementation finds the same bits."""
    dim = x.shape[-1]
    block, half = dim & -dim, 1
    x = x.float()
    while half < block:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        half *= 2
    return x * torch.tensor(float(block) ** -0.5, dtype=torch.float32)


# ---------------------------------------------------------------- a group's bytes


def encode_group(kv_format: str, k: Tensor, v: Tensor) -> Tensor:
    """uint8 [..., group bytes] of ``k``, ``v`` float32 [..., 16, D], rotated where the format is.

    A token with a value that is not finite gets the scale NaN (i4c: the channel's minimum is NaN).
    """
    parts = {"fp32": _put_fp32, "bf16": _put_bf16, "i8": _put_i8, "f8": _put_f8,
             "k8v4": _put_k8v4, "i4c": _put_i4c}[kv_format](k, v)  # fmt: skip
    return torch.cat([part.flatten(k.dim() - 2) for part in parts], -1)


def decode_group(kv_format: str, tiles: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """K and V, float32 [..., 16, D] each, of uint8 [..., group bytes], rotated if the format is."""
    entry = FORMATS[kv_format]
    sizes = [entry.meta_bytes(dim), entry.k_bytes(dim), entry.v_bytes(dim)]
    meta, k, v = (part.contiguous() for part in torch.split(tiles, sizes, -1))
    read = {"fp32": _get_fp32, "bf16": _get_bf16, "i8": _get_i8, "f8": _get_f8,
            "k8v4": _get_k8v4, "i4c": _get_i4c}[kv_format]  # fmt: skip
    return read(meta, k, v, dim)


def _cut(x: Tensor, *shape: int) -> Tensor:
    """The last dimension of ``x`` as several."""
    return x.reshape(*x.shape[:-1], *shape)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _f16(meta: Tensor, first: int, count: int) -> Tensor:
    """``count`` fp16 numbers from byte ``first`` on, as float32."""
    return meta[..., first : first + 2 * count].contiguous().view(torch.float16).float()


# ---------------------------------------------------------------- fp32, bf16


def _columns(v: Tensor) -> Tensor:
    """[..., 16, D] to [..., D / 16, 16 tokens, 16 channels]."""
    return _cut(v, -1, 16).transpose(-3, -2)


def _put_fp32(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _bytes(k.transpose(-1, -2)), _bytes(_columns(v))


def _put_bf16(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = _cut(k.bfloat16(), -1, 2), _columns(v.bfloat16())
    return _bytes(k.transpose(-3, -2)), _bytes(v.reshape(*v.shape[:-2], 8, 2, 16).transpose(-1, -2))


def _get_fp32(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    k = _cut(k.view(torch.float32), dim, 16).transpose(-1, -2)
    v = _cut(v.view(torch.float32), dim // 16, 16, 16)
    return k, v.transpose(-3, -2).flatten(-2)


def _get_bf16(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    k = _cut(k.view(torch.bfloat16).float(), dim // 2, 16, 2)
    v = _cut(v.view(torch.bfloat16).float(), dim // 16, 8, 16, 2)
    v = v.transpose(-1, -2).flatten(-3, -2)
    return k.transpose(-3, -2).flatten(-2), v.transpose(-3, -2).flatten(-2)


# ---------------------------------------------------------------- 8 bits


def _scales(x: Tensor, largest: float) -> Tensor:
    """fp16 [..., 16] of [..., 16, D]: the largest magnitude over ``largest``."""
    top = x.abs().amax(-1)
    scale = (top / largest).clamp(max=_F16_MAX).half()
    return _mark(scale, ~x.isfinite().all(-1))


def _mark(scale: Tensor, where: Tensor) -> Tensor:
    """fp16 with NaN where asked, always the same bits."""
    return scale.view(torch.int16).masked_fill(where, 0x7E00).view(torch.float16)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, 0 where the scale is 0 or NaN."""
    usable = scale > 0
    return torch.where(usable, x / torch.where(usable, scale, 1.0), 0.0)


def _codes8(x: Tensor, scale: Tensor) -> Tensor:
    return _divide(x, scale.float()[..., None]).round().clamp(-127, 127)


def _quads_of_channels(k: Tensor) -> Tensor:
    """[..., 16, D] to [..., D / 4, 16, 4]."""
    return _cut(k, -1, 4).transpose(-3, -2)


def _quads_of_tokens(v: Tensor) -> Tensor:
    """[..., 16, D] to [..., D / 16, 4 quads, 16 channels, 4 tokens]."""
    columns = _columns(v)
    return columns.reshape(*columns.shape[:-2], 4, 4, 16).transpose(-1, -2)


def _channels_of(k: Tensor, dim: int) -> Tensor:
    return _cut(k, dim // 4, 16, 4).transpose(-3, -2).flatten(-2)


def _tokens_of(v: Tensor, dim: int) -> Tensor:
    v = _cut(v, dim // 16, 4, 16, 4).transpose(-1, -2).flatten(-3, -2)
    return v.transpose(-3, -2).flatten(-2)


def _put_i8(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k_scale, v_scale = _scales(k, 127.0), _scales(v, 127.0)
    k_codes = (_codes8(k, k_scale) + 128).to(torch.uint8)
    v_codes = _codes8(v, v_scale).to(torch.int8)
    return (_bytes(k_scale), _bytes(v_scale), _quads_of_channels(k_codes),
            _bytes(_quads_of_tokens(v_codes)))  # fmt: skip


def _get_i8(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    keys = _channels_of(k.float() - 128, dim) * _f16(meta, 0, 16)[..., None]
    values = _tokens_of(v.view(torch.int8).float(), dim) * _f16(meta, 32, 16)[..., None]
    return keys, values


def _put_f8(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k_scale, v_scale = _scales(k, 448.0), _scales(v, 448.0)
    k_codes, v_codes = (
        _divide(x, s.float()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for x, s in ((k, k_scale), (v, v_scale))
    )
    return (_bytes(k_scale), _bytes(v_scale), _quads_of_channels(_bytes(k_codes)),
            _quads_of_tokens(_bytes(v_codes)))  # fmt: skip


def _get_f8(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    keys = _channels_of(k.view(torch.float8_e4m3fn).float(), dim)
    values = _tokens_of(v.view(torch.float8_e4m3fn).float(), dim)
    return keys * _f16(meta, 0, 16)[..., None], values * _f16(meta, 32, 16)[..., None]


# ---------------------------------------------------------------- 4 bits


# 4-bit codes stand for minimum + code * scale. The scale that just spans the values is not the best
# one: with a somewhat smaller one most values come closer, and a few at the ends are cut. So three
# scales are tried, each with the minimum that makes the mean error 0, and the one with the smallest
# squared error is taken, the largest of equals. Sums have a fixed order: the same bits everywhere.


def _codes4(x: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    return ((x - low) / scale).round().clamp(0, 15)


def _tree_sum(x: Tensor) -> Tensor:
    """[..., n * 16] to [...]: 16 sums, every 16th each, and these by halves."""
    parts = _cut(x, -1, 16)
    total = parts[..., 0, :]
    for i in range(1, parts.shape[-2]):
        total = total + parts[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _row_sum(x: Tensor) -> Tensor:
    """[..., 16, D] to [..., D], one token after the other."""
    total = x[..., 0, :]
    for t in range(1, TOKEN_GROUP):
        total = total + x[..., t, :]
    return total


def _keep_better(best: tuple[Tensor, ...] | None, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of two choices - (error, scale, minimum) each - the better one, place by place."""
    if best is None:
        return found
    wins = found[0] < best[0]
    return tuple(torch.where(wins, new, old) for new, old in zip(found, best, strict=True))


def _put_v4(v: Tensor) -> tuple[Tensor, Tensor]:
    """Metadata [..., P, 64] and codes [..., 8 D] of V [..., 16, D]."""
    meta, codes = [], []
    for plane in torch.split(v, _PLANE, -1):
        scale, low = _choose_v4(plane)
        used = torch.where(scale.float() > 0, scale.float(), 1.0)[..., None]
        code = _codes4(plane, low.float()[..., None], used)
        codes.append(torch.where(scale.float()[..., None] > 0, code, 0.0))
        meta.append(torch.cat((_bytes(scale), _bytes(low)), -1))
    quads = _quads_of_tokens(torch.cat(codes, -1).to(torch.uint8))
    return torch.stack(meta, -2), quads[..., :2, :, :] | quads[..., 2:, :, :] << 4


def _choose_v4(plane: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 scale and minimum [..., 16] of a plane [..., 16, up to 64]."""
    finite, count = plane.isfinite().all(-1), plane.shape[-1]
    x = torch.where(finite[..., None], plane, 0.0)
    low, high = x.amin(-1) + 0.0, x.amax(-1) + 0.0
    middle, step = (low + high) * 0.5, (high - low) / 15
    best = None
    for factor in (1.0, 0.9375, 0.875):
        scale = (step * factor).clamp(max=_F16_MAX).half()
        used = torch.where(scale.float() > 0, scale.float(), 1.0)[..., None]
        code = _codes4(x, middle[..., None] - 7.5 * used, used)
        code = torch.where(scale.float()[..., None] > 0, code, 0.0)
        start = (_tree_sum(x - code * scale.float()[..., None]) / count + 0.0).clamp(
            -_F16_MAX, _F16_MAX
        )
        minimum = start.half()
        code = _codes4(x, minimum.float()[..., None], used)
        code = torch.where(scale.float()[..., None] > 0, code, 0.0)
        error = code * scale.float()[..., None] + minimum.float()[..., None] - x
        best = _keep_better(best, (_tree_sum(error * error), scale, minimum))
    assert best is not None
    return _mark(best[1], ~finite), best[2].masked_fill(~finite, 0.0)


def _get_v4(meta: Tensor, v: Tensor, dim: int) -> Tensor:
    packed = _cut(v, dim // 16, 2, 16, 4)
    codes = _tokens_of(torch.cat((packed & 15, packed >> 4), -3).flatten(-4).float(), dim)
    planes = [
        plane * _f16(line, 0, 16)[..., None] + _f16(line, 32, 16)[..., None]
        for plane, line in zip(
            torch.split(codes, _PLANE, -1), torch.split(meta, 64, -1), strict=True
        )
    ]
    return torch.cat(planes, -1)


def _put_k8v4(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    scale = _scales(k, 127.0)
    k_codes = (_codes8(k, scale) + 128).to(torch.uint8)
    meta, v_codes = _put_v4(v)
    pad = torch.zeros_like(_bytes(scale))
    return _bytes(scale), pad, meta, _quads_of_channels(k_codes), v_codes


def _get_k8v4(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    keys = _channels_of(k.float() - 128, dim) * _f16(meta, 0, 16)[..., None]
    return keys, _get_v4(meta[..., 64:], v, dim)


def _scale_byte(x: Tensor) -> Tensor:
    """uint8 of float32 >= 0: the smallest scale that is not below x, 2^-11 at least, 31 at most."""
    bits = x.contiguous().view(torch.int32)
    return (((bits + (1 << 19) - 1) >> 19) - (116 << 4)).clamp(0, 255).to(torch.uint8)


def _scale_of(byte: Tensor) -> Tensor:
    return ((byte.int() + (116 << 4)) << 19).view(torch.float32)


def _put_i4c(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    byte, low = _choose_i4c(k)
    finite = k.isfinite().all(-2, keepdim=True)
    codes = _codes4(k, low.float()[..., None, :], _scale_of(byte)[..., None, :])
    eights = _cut(torch.where(finite, codes, 0.0).to(torch.uint8), -1, 2, 4)
    packed = (eights[..., 0, :] | eights[..., 1, :] << 4).transpose(-3, -2)
    meta, v_codes = _put_v4(v)
    used = 3 * k.shape[-1]
    pad = byte.new_zeros(*byte.shape[:-1], _lines(used) - used)
    return byte, _bytes(low), pad, meta, packed, v_codes


def _choose_i4c(k: Tensor) -> tuple[Tensor, Tensor]:
    """Scale byte and fp16 minimum [..., D] of keys [..., 16, D]."""
    finite = k.isfinite().all(-2)
    x = torch.where(finite[..., None, :], k, 0.0)
    low, high = x.amin(-2) + 0.0, x.amax(-2) + 0.0
    middle, first = (low + high) * 0.5, _scale_byte((high - low) / 15).int()
    best = None
    for smaller in range(3):
        byte = (first - smaller).clamp(min=0).to(torch.uint8)
        scale = _scale_of(byte)
        code = _codes4(x, (middle - 7.5 * scale)[..., None, :], scale[..., None, :])
        start = _row_sum(x - code * scale[..., None, :]) * 0.0625 + 0.0
        minimum = start.clamp(-_F16_MAX, _F16_MAX).half()
        code = _codes4(x, minimum.float()[..., None, :], scale[..., None, :])
        error = code * scale[..., None, :] + minimum.float()[..., None, :] - x
        best = _keep_better(best, (_row_sum(error * error), byte, minimum))
    assert best is not None
    return best[1], _mark(best[2], ~finite)


def _get_i4c(meta: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    packed = _cut(k, dim // 8, 16, 4).transpose(-3, -2)
    codes = torch.stack((packed & 15, packed >> 4), -2).flatten(-3).float()
    keys = codes * _scale_of(meta[..., :dim])[..., None, :] + _f16(meta, dim, dim)[..., None, :]
    return keys, _get_v4(meta[..., _lines(3 * dim) :], v, dim)
