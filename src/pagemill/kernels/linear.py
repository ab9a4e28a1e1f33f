"""x W^T + b in float32, for float32, bfloat16 and packed weights."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill import _native
from pagemill.kernels.packed import PackedMatrix, linear_packed

PACKED_TOKENS = 96
"""Up to so many rows weights stay packed in a product; more are faster with wide weights."""

Matrix = Tensor | PackedMatrix
"""A weight matrix [N, K]."""

HAS_BF16_PRODUCT: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""The processor multiplies bfloat16 itself; then torch's product of many rows is twice as fast."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """float32 [T, N] of ``x`` float32 [T, K], ``weight`` [N, K] and ``bias`` float32 [N].

    Many rows of bfloat16 weights are multiplied in bfloat16 where the processor does that itself
    (AVX512-BF16 or AMX), else as float32. Few rows (``linear_tokens``) go through the compiled
    product, which reads the weights once as they lie; there a row's result does not depend on the
    others, while torch's products round differently with the number of rows. Packed weights go
    through the compiled product of their own.
    """
    if isinstance(weight, PackedMatrix):
        out = _linear_packed(x, weight)
        return out if bias is None else out.add_(bias)
    if weight.dtype != torch.bfloat16:
        return functional.linear(x, weight, bias)
    if x.shape[0] <= _native.linear_tokens():
        out = linear_bf16(x, weight)
    elif HAS_BF16_PRODUCT:
        out = functional.linear(x.bfloat16(), weight).float()
    else:
        out = functional.linear(x, widen(weight))
    return out if bias is None else out.add_(bias)


def _linear_packed(x: Tensor, weight: PackedMatrix) -> Tensor:
    """Many rows pay for unpacking, piece by piece; the product is then the one of wide weights."""
    if x.shape[0] <= PACKED_TOKENS:
        return linear_packed(x, weight)
    dtype = torch.bfloat16 if HAS_BF16_PRODUCT else torch.float32
    x = x.to(dtype)
    out = torch.empty(x.shape[0], weight.shape[0])
    for first, piece in weight.wide_rows(dtype):
        out[:, first : first + len(piece)] = functional.linear(x, piece)
    return out


def embed(token_ids: Tensor, embedding: Matrix) -> Tensor:
    """float32 [T, N]: rows ``token_ids`` (int64 [T]) of the embedding [V, N]."""
    if isinstance(embedding, PackedMatrix):
        return embedding.rows(token_ids)
    return functional.embedding(token_ids, embedding).float()


def first_rows(weight: Matrix, count: int) -> Matrix:
    """The first ``count`` rows, without a copy."""
    return weight.first_rows(count) if isinstance(weight, PackedMatrix) else weight[:count]


def matrix_bytes(weight: Matrix) -> int:
    return weight.num_bytes if isinstance(weight, PackedMatrix) else weight.nbytes


def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, N] of float32 [T, K] and bfloat16 [N, K], both contiguous; meant for small T."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _native.linear_bf16(x, weight, out)
    return out


def widen(weight: Tensor) -> Tensor:
    """bfloat16 [N, K] as float32 [N, K]."""
    out = weight.new_empty(weight.shape, dtype=torch.float32)
    _native.widen_bf16(weight, out)
    return out
