"""The token budget of one step, in two lanes.

    |<-------------------------- budget -------------------------->|
    | decodes, one each | main lane: long prompts  | fast lane      |

Every decode gets its token first, so that no stream stutters. What is left is cut in two:
prompts in queue order share the main lane, and a quarter is a fast lane for prompts that a few
steps can finish, so that a short prompt behind a very long one does not wait for all of it. What
one lane does not use, the other may.
"""

from dataclasses import dataclass

FAST_LANE_SHARE = 4
"""The fast lane is one part in this many of what decodes leave."""


@dataclass(slots=True)
class TokenBudget:
    """Tokens that a step may still compute."""

    main: int
    fast: int = 0

    @property
    def left(self) -> int:
        return self.main + self.fast

    def take(self, num_tokens: int, *, from_fast: bool = False) -> None:
        """Use tokens of one lane first, then of the other."""
        assert num_tokens <= self.left, f"{num_tokens} tokens taken, {self.left} left"
        first = min(num_tokens, self.fast if from_fast else self.main)
        rest = num_tokens - first
        if from_fast:
            self.fast, self.main = self.fast - first, self.main - rest
        else:
            self.main, self.fast = self.main - first, self.fast - rest

    def give_back(self, num_tokens: int) -> None:
        """A sequence planned in this step was preempted again."""
        self.main += num_tokens

    def split(self, *, keep_fast_lane: bool) -> None:
        """Divide what decodes left into the two lanes."""
        total = self.left
        self.fast = total // FAST_LANE_SHARE if keep_fast_lane else 0
        self.main = total - self.fast
