"""The sequences of a step as arrays, for the kernels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Runs of blocks that several sequences have at the same places of their tables; attention
    reads them once for all that compute one token.

    ``runs`` int32 [2 R]: first entry and number of entries of each run. ``members`` int32: those of
    run r are the sequences members[run_indptr[r]] ... members[run_indptr[r + 1] - 1].
    ``run_indptr`` [R + 1].
    """

    runs: Int32s
    members: Int32s
    run_indptr: Int32s


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences of a step in one layer group; any mix of chunks and single tokens.

    Rows [query_start[i], query_start[i + 1]) of q belong to sequence i, whose first one stands at
    position context_start[i]: so many tokens came before it. Its block ids are [indptr[i],
    indptr[i + 1]); entry j holds the tokens [j * B, (j + 1) * B). All int32 and contiguous:
    ``query_start`` [S + 1], ``context_start`` [S], ``block_ids`` [sum of lengths], ``indptr``
    [S + 1]. ``tail_slots`` [S]: where a sequence's unfilled group of 16 tokens is kept, for formats
    that code whole groups.

        positions   0 ............ context_start[i] ............ end
                    |  in the cache before  |  the rows of q   |
    """

    query_start: Int32s
    context_start: Int32s
    block_ids: Int32s
    indptr: Int32s
    tail_slots: Int32s | None = None
    shared: SharedBlocks | None = None
