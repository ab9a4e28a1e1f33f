"""The seam to computation. The model runner and the simulated executor are the two sides of it."""

from typing import Protocol

from pagemill.core.step import StepPlan, StepResult
from pagemill.core.types import StepId


class Executor(Protocol):
    """Runs step plans in the order of submission."""

    def submit(self, plan: StepPlan) -> StepId:
        """Start a step and return at once."""
        ...

    def collect(self, step_id: StepId) -> StepResult:
        """Wait for a step. Each submitted step is collected exactly once, in order."""
        ...

    def close(self) -> None:
        """Stop threads and give memory back."""
        ...
