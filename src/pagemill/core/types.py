"""The words of the house as types. Distinct integers are NewTypes, they cannot be mixed up."""

from collections.abc import Iterator
from typing import NewType, Protocol

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
TableId = NewType("TableId", int)
GroupId = NewType("GroupId", int)
StepId = NewType("StepId", int)
SequenceId = NewType("SequenceId", int)
RequestId = NewType("RequestId", str)
BlockHash = NewType("BlockHash", bytes)

NULL_BLOCK = BlockId(0)
"""Block 0 of every pool: target of padding and of tokens that left a window. Never handed out."""


class IntBuffer(Protocol):
    """A flat run of integers: ``array.array`` and one-dimensional numpy arrays both fit."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...

    def __iter__(self) -> Iterator[int]: ...
