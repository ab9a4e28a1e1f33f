"""What attention reads of a step: where queries stand and which blocks they see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemill.core.step import GroupTables
from pagemill.core.types import IntBuffer

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TableArrays:
    """Block tables of one layer group: ``block_ids`` int32 [sum], ``indptr`` int32 [S + 1]."""

    block_ids: Int32s
    indptr: Int32s


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences of a step; any mix of chunks and single tokens.

    Rows [query_start[i], query_start[i + 1]) of q belong to sequence i, whose first one stands at
    position context_start[i]: so many tokens came before it. One ``TableArrays`` a layer group.

        positions   0 ............ context_start[i] ............ end
                    |  in the cache before  |  the rows of q   |
    """

    query_start: Int32s
    context_start: Int32s
    tables: tuple[TableArrays, ...]

    @classmethod
    def make(
        cls, query_start: IntBuffer, context_start: IntBuffer, tables: Sequence[GroupTables]
    ) -> "AttentionBatch":
        """From any buffers of integers; those of int32 are not copied."""
        return cls(
            _int32(query_start),
            _int32(context_start),
            tuple(TableArrays(_int32(t.block_ids), _int32(t.indptr)) for t in tables),
        )


def _int32(values: IntBuffer) -> Int32s:
    return np.ascontiguousarray(values, np.int32)
