"""Hits that a block cache must find, by comparing every prompt with every earlier one.

Imports nothing of pagemill, so that it can disagree with it.
"""

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    size = min(len(one), len(other))
    for i in range(size):
        if one[i] != other[i]:
            return i
    return size


def expected_hits(
    prompts: Sequence[Sequence[int]],
    block_size: int,
    outputs: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Hit tokens of each prompt when all earlier ones are cached whole and nothing is evicted.

    ``outputs`` are the generated tokens whose KV was computed: all but the last of each. Where a
    model writes what the next prompt says as well, they are found too. The last token of a prompt
    is always computed, so a hit is at most len - 1, in whole blocks.
    """
    cached = [[*p, *o] for p, o in zip(prompts, outputs or [[]] * len(prompts), strict=True)]
    hits = []
    for i, prompt in enumerate(prompts):
        longest = max((common_prefix(prompt, earlier) for earlier in cached[:i]), default=0)
        hits.append(min(longest, len(prompt) - 1) // block_size * block_size)
    return hits


def exact_hits(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """The same at single tokens: what no block cache can pass."""
    return expected_hits(prompts, 1, outputs)
