"""Tail slots: where a sequence keeps the tokens of its unfilled group, for KV formats that code
whole groups. A pool beside the block pool; every open table has one slot."""

from collections.abc import Sequence

from pagemill.core.errors import IntegrityError
from pagemill.core.types import TableId


class TailSlots:
    """``num_tails`` slots; with 0 there are none, and every call does nothing.

    1. A slot belongs to at most one table; every open table has one.
    2. free + taken = num_tails.
    """

    __slots__ = ("_free", "_num_tails", "_of")

    def __init__(self, num_tails: int) -> None:
        self._num_tails = num_tails
        self._free = list(range(num_tails - 1, -1, -1))
        self._of: dict[TableId, int] = {}

    @property
    def has_free(self) -> bool:
        """Can one more table be opened?"""
        return bool(self._free) or not self._num_tails

    def take(self, table: TableId) -> None:
        """A slot for a new table; the caller has seen that one is free."""
        if self._num_tails:
            assert self._free, "a table was opened beyond the tail slots"
            self._of[table] = self._free.pop()

    def give_back(self, table: TableId) -> None:
        """The table is gone."""
        if self._num_tails:
            self._free.append(self._of.pop(table))

    def of(self, tables: Sequence[TableId]) -> tuple[int, ...]:
        """The slots of ``tables``, in order."""
        return tuple(self._of[table] for table in tables) if self._num_tails else ()

    def check(self, num_open_tables: int) -> None:
        """Raises IntegrityError where an invariant does not hold."""
        if not self._num_tails:
            return
        slots = sorted([*self._free, *self._of.values()])
        if slots != list(range(self._num_tails)) or len(self._of) != num_open_tables:
            raise IntegrityError(
                1,
                f"{len(self._of)} tail slots are taken and {len(self._free)} free, of"
                f" {self._num_tails}, and {num_open_tables} tables are open",
            )
