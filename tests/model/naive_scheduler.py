"""The naive twin of the scheduler's division of a budget, token by token.

For pools that never run out: then a step is decided by order, lanes and limits alone. Tokens of the
budget are single slips of paper in two boxes; whoever may have one takes it.
"""

from dataclasses import dataclass


@dataclass
class NaiveRequest:
    """``order`` sorts requests; ``missing`` tokens are known and not computed."""

    name: int
    order: tuple[int, ...]
    missing: int
    is_running: bool = False
    is_finished: bool = False


class NaiveScheduler:
    """Hands out one step's tokens. ``budget`` slips; prompts up to ``budget`` tokens are short."""

    def __init__(self, budget: int, max_num_seqs: int) -> None:
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.requests: list[NaiveRequest] = []

    def plan(self) -> dict[int, int]:
        """Tokens by request; also marks who has started."""
        ordered = sorted((r for r in self.requests if not r.is_finished), key=lambda r: r.order)
        given: dict[int, int] = {}
        self.main, self.fast = self.budget, 0
        for request in ordered:
            if request.is_running and request.missing == 1:
                self._give(given, request, ["main"])
        self._fill_the_fast_box(ordered)
        for request in ordered:
            if request.is_running and request.name not in given:
                self._give_prompt(given, request)
        for request in [r for r in ordered if not r.is_running]:
            running = sum(r.is_running and not r.is_finished for r in self.requests)
            if running < self.max_num_seqs and self.main + self.fast:
                self._give_prompt(given, request)
        for name in list(given):
            request = next(r for r in ordered if r.name == name)
            self._give(given, request, ["main", "fast"])
        return given

    def _fill_the_fast_box(self, ordered: list[NaiveRequest]) -> None:
        prompts = [r for r in ordered if not r.is_running or r.missing > 1]
        if len(prompts) > 1:
            self.fast = self.main // 4
            self.main -= self.fast

    def _give_prompt(self, given: dict[int, int], request: NaiveRequest) -> None:
        is_short = request.missing <= self.budget
        self._give(given, request, ["fast", "main"] if is_short else ["main"])

    def _give(self, given: dict[int, int], request: NaiveRequest, boxes: list[str]) -> None:
        for box in boxes:
            while getattr(self, box) > 0 and given.get(request.name, 0) < request.missing:
                setattr(self, box, getattr(self, box) - 1)
                given[request.name] = given.get(request.name, 0) + 1
                request.is_running = True
