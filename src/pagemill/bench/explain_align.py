"""What a prompt has in common with earlier ones, at the token.

    earlier   | same | was |===== same text =====| ...
    now       | same | now |===== same text =====| ...
              0      d     r                          lost: the tokens of equal runs behind d

Runs of equal text are found by hashes of 16 tokens; one position in eight, chosen by its hash, is
kept, so the same text chooses the same positions wherever it stands.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemill.bench.explain_read import LoggedRequest
from pagemill.bench.explain_tokens import Prompt

SHINGLE_TOKENS = 16
KEEP_ONE_IN = 8
FACTOR = np.uint64(0x9E3779B97F4A7C15)
Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` equal tokens, at ``now`` in this prompt and at ``was`` in the earlier one."""

    now: int
    was: int
    length: int


@dataclass(frozen=True, slots=True)
class Earlier:
    """A prompt that was seen, kept to compare with."""

    request: LoggedRequest
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Relative:
    """The earlier prompt that has most of what this one missed. ``num_equal``: common tokens at
    the start of both. ``runs``: equal text behind it, in order."""

    earlier: Earlier
    num_equal: int
    runs: tuple[Run, ...]

    @property
    def lost_tokens(self) -> int:
        return sum(run.length for run in self.runs)


def shingles(tokens: Tokens) -> tuple[list[int], list[int]]:
    """(hashes, positions) of the kept positions."""
    count = len(tokens) - SHINGLE_TOKENS + 1
    if count <= 0:
        return [], []
    wide = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, np.uint64)
    for k in range(SHINGLE_TOKENS):
        hashes = (hashes ^ (hashes >> np.uint64(29)) ^ wide[k : k + count]) * FACTOR
    kept = np.flatnonzero((hashes >> np.uint64(40)) % np.uint64(KEEP_ONE_IN) == 0)
    return hashes[kept].tolist(), kept.tolist()


def common_length(a: Tokens, b: Tokens) -> int:
    """Equal tokens at the start."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


class Memory:
    """The last prompts, and where their text stands. Bounded in prompts and in tokens."""

    def __init__(self, max_prompts: int = 4096, max_tokens: int = 1 << 25) -> None:
        self._max_prompts, self._max_tokens = max_prompts, max_tokens
        self._prompts: OrderedDict[int, tuple[Earlier, list[int]]] = OrderedDict()
        self._places: dict[int, tuple[int, int]] = {}
        self._num_tokens = 0
        self._next = 0

    def add(self, earlier: Earlier) -> None:
        hashes, positions = shingles(earlier.prompt.token_ids)
        self._places.update((h, (self._next, p)) for h, p in zip(hashes, positions, strict=True))
        self._prompts[self._next] = earlier, hashes
        self._next += 1
        self._num_tokens += len(earlier.prompt.token_ids)
        while len(self._prompts) > 1 and (
            len(self._prompts) > self._max_prompts or self._num_tokens > self._max_tokens
        ):
            self._forget()

    def _forget(self) -> None:
        number, (earlier, hashes) = self._prompts.popitem(last=False)
        self._num_tokens -= len(earlier.prompt.token_ids)
        for h in hashes:
            if self._places.get(h, (-1, 0))[0] == number:
                del self._places[h]

    def relative(self, tokens: Tokens, num_hit: int) -> Relative | None:
        """The earlier prompt with most of the text from ``num_hit`` on; None where it is new."""
        hashes, positions = shingles(tokens[num_hit:])
        places = [
            (p + num_hit, *self._places[h])
            for h, p in zip(hashes, positions, strict=True)
            if h in self._places
        ]
        if not places:
            return None
        votes = Counter(number for _, number, _ in places)
        best = max(votes, key=lambda number: (votes[number], number))
        earlier = self._prompts[best][0]
        num_equal = common_length(tokens, earlier.prompt.token_ids)
        pairs = [(now, was) for now, number, was in places if number == best]
        runs = _runs(tokens, earlier.prompt.token_ids, pairs, max(num_hit, num_equal))
        return Relative(earlier, num_equal, runs)


def _runs(now: Tokens, was: Tokens, pairs: list[tuple[int, int]], start: int) -> tuple[Run, ...]:
    """Each pair made as long as it goes, from ``start`` on, none over another."""
    runs: list[Run] = []
    end = start
    for i, j in pairs:
        if i < end:
            continue
        back = common_length(now[end:i][::-1], was[:j][::-1])
        length = back + common_length(now[i:], was[j:])
        if length >= SHINGLE_TOKENS:
            runs.append(Run(i - back, j - back, length))
            end = i - back + length
    return tuple(runs)
