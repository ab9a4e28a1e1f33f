"""Weight matrices that stay quantized as their GGUF file has them, and products with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill import _native

PIECE_VALUES = 1 << 21
"""Weights that are unpacked at a time for a product of many rows."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of one GGUF type. ``packed`` uint8, laid out by ``csrc/kernels/packed_weights.hpp``."""

    type: str
    packed: Tensor
    num_rows: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K] of packed parts, one under the other."""

    parts: tuple[PackedPart, ...]
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_rows for part in self.parts), self.num_columns

    def numel(self) -> int:
        return self.shape[0] * self.num_columns

    @property
    def num_bytes(self) -> int:
        return sum(part.packed.nbytes for part in self.parts)

    def first_rows(self, count: int) -> "PackedMatrix":
        """The first ``count`` rows, of a matrix of one part; the bytes are shared."""
        (part,) = self.parts
        return replace(self, parts=(replace(part, num_rows=min(count, part.num_rows)),))

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [len(ids), K]: rows ``ids`` (int64 [n]) of a matrix of one part, unpacked."""
        (part,) = self.parts
        out = torch.empty(len(ids), self.num_columns)
        _native.packed_rows(part.type, part.packed, part.num_rows, ids, out)
        return out

    def wide_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The matrix as pieces of ``dtype`` (bfloat16 or float32): first row, [rows, K]."""
        unpack = {torch.bfloat16: _native.unpack_to_bf16, torch.float32: _native.unpack_to_float}
        step = max(16, PIECE_VALUES // self.num_columns // 16 * 16)
        start = 0
        for part in self.parts:
            for first in range(0, part.num_rows, step):
                num_rows = min(step, part.num_rows - first)
                piece = torch.empty(num_rows, self.num_columns, dtype=dtype)
                unpack[dtype](part.type, part.packed, part.num_rows, first, piece)
                yield start + first, piece
            start += part.num_rows


def can_pack(gguf_type: str, num_columns: int) -> bool:
    """Whether rows of a GGUF type can stay packed."""
    block = _native.packed_form(gguf_type)
    return block is not None and num_columns % block[0] == 0


def row_bytes(gguf_type: str, num_columns: int) -> int:
    """Bytes of a row in the file, of a type that can stay packed."""
    columns, num_bytes, _ = _native.packed_form(gguf_type) or (1, 0, 1)
    return num_columns // columns * num_bytes


def pack(gguf_type: str, rows: Tensor, num_columns: int) -> PackedMatrix:
    """A matrix of GGUF blocks, uint8 [N, bytes of a row]. The codes stay as they are."""
    num_bytes = _native.packed_bytes(gguf_type, len(rows), num_columns)
    out = torch.empty(num_bytes, dtype=torch.uint8)
    _native.pack_weights(gguf_type, rows.contiguous(), num_columns, out)
    return PackedMatrix((PackedPart(gguf_type, out, len(rows)),), num_columns)


def stack(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Matrices of equal width, one under the other."""
    parts = tuple(part for matrix in matrices for part in matrix.parts)
    return PackedMatrix(parts, matrices[0].num_columns)


def linear_packed(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """float32 [T, N] of ``x`` float32 [T, K], contiguous.

    x is rounded to integers of 12 bits (4-bit codes) or 15 bits (8-bit codes) with a scale for each
    token and 32 columns; sums over a group of weights are exact. A row's result does not depend on
    the others.
    """
    out = x.new_empty(x.shape[0], matrix.shape[0])
    first_column = 0
    for part in matrix.parts:
        _native.linear_packed(x, part.type, part.packed, part.num_rows, out, first_column)
        first_column += part.num_rows
    return out
