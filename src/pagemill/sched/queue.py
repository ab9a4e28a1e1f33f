"""The waiting queue and the order of requests: one policy is one key function and one line."""

from bisect import insort
from collections.abc import Callable, Iterator

from pagemill.core.errors import ConfigError
from pagemill.core.request import Request

OrderKey = tuple[int, ...]


def fcfs(request: Request) -> OrderKey:
    """First come, first served."""
    return (request.arrival_ns, request.sequence_id)


def priority(request: Request) -> OrderKey:
    """Lower priority numbers first, as in vLLM; first come, first served among equals."""
    return (request.priority, request.arrival_ns, request.sequence_id)


ORDERS: dict[str, Callable[[Request], OrderKey]] = {"fcfs": fcfs, "priority": priority}


def order_named(name: str) -> Callable[[Request], OrderKey]:
    """The order of a policy's name. Raises ConfigError with the names there are."""
    if name not in ORDERS:
        raise ConfigError(f"scheduling policy {name!r}: choose one of {', '.join(ORDERS)}")
    return ORDERS[name]


class WaitingQueue:
    """Requests that wait, in the order of a key. A preempted request comes back to its old place,
    because its key has not changed."""

    def __init__(self, order: Callable[[Request], OrderKey]) -> None:
        self._order = order
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self._order)

    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
