"""The seam to time: nobody below the engine asks the system, they are handed a Clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic nanoseconds from any origin."""

    def now_ns(self) -> int: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """A clock that moves only when told to: for the simulator and for tests."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, duration_ns: int) -> None:
        assert duration_ns >= 0, f"time cannot run backwards ({duration_ns} ns)"
        self._now_ns += duration_ns
