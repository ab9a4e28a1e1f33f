"""Whose blocks are taken when there are too few: the last in order, never one before the taker.

Progress is guaranteed: the first request in order is nobody's victim and may take from all others,
and a preempted request comes back to its old place. So two requests cannot throw each other out.
"""

from collections.abc import Callable, Sequence

from pagemill.core.request import Request


def choose_victim(
    running: Sequence[Request], taker: Request, order: Callable[[Request], tuple[int, ...]]
) -> Request | None:
    """The last running request in order, if it stands behind ``taker``; else None."""
    behind = [r for r in running if r is not taker and order(r) > order(taker)]
    return max(behind, key=order, default=None)
