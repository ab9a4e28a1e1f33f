"""Every family against ``transformers`` in float32: logits at every position, and greedy tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.checkpoints import CASES, random_model, random_prompt, reference_logits, save_folder
from model.paged_run import assert_same_as, run_paged
from pagemill.models.loader import Model, load_model

PROMPT_TOKENS = 97
"""Four to six windows long, and no multiple of a block."""
Pair = tuple[Any, Model]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The reference and pagemill's own model of a case, from the same folder."""
    made: dict[str, Pair] = {}

    def make(case: str) -> Pair:
        if case not in made:
            reference = random_model(case)
            shards = {"max_shard_size": "60KB"} if case == "llama" else {}
            folder = save_folder(reference, tmp_path_factory.mktemp(case), **shards)
            made[case] = reference, load_model(folder, torch.float32)
        return made[case]

    return make


@pytest.mark.parametrize("chunk_tokens", [PROMPT_TOKENS, 13])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(
    pair: Callable[[str], Pair], case: str, chunk_tokens: int
) -> None:
    reference, model = pair(case)
    run = run_paged(model, random_prompt(PROMPT_TOKENS), 64, chunk_tokens=chunk_tokens)
    assert run.num_steps == -(-PROMPT_TOKENS // chunk_tokens) + 63
    expected = reference_logits(reference, run.token_ids)
    assert expected.std(dim=1).mean() > 0.5, "the reference's logits are nearly alike"
    worst = assert_same_as(expected, run, PROMPT_TOKENS)
    print(f"{case}: largest logit difference {worst:.2e}")
