"""Every family against ``transformers`` in float32: logits at every position, and greedy tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.checkpoints import CASES, random_model, random_prompt, reference_logits, save_folder
from model.paged_run import assert_same_as, run_paged
from pagemill.models.config import ModelConfig, RopeConfig
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
            assert case != "llama" or len(list(folder.glob("model-0*-of-0*.safetensors"))) > 3
            made[case] = reference, load_model(folder, torch.float32)
        return made[case]

    return make


@pytest.mark.parametrize(("chunk_tokens", "num_output"), [(PROMPT_TOKENS, 64), (13, 20)])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(
    pair: Callable[[str], Pair], case: str, chunk_tokens: int, num_output: int
) -> None:
    reference, model = pair(case)
    run = run_paged(model, random_prompt(PROMPT_TOKENS), num_output, chunk_tokens=chunk_tokens)
    assert run.num_steps == -(-PROMPT_TOKENS // chunk_tokens) + num_output - 1
    expected = reference_logits(reference, run.token_ids)
    assert expected.std(dim=1).mean() > 0.5, "the reference's logits are nearly alike"
    worst = assert_same_as(expected, run, PROMPT_TOKENS)
    print(f"{case}: largest logit difference {worst:.2e}")


def _other_rope(config: ModelConfig, which: int, **changes: Any) -> ModelConfig:
    ropes = list(config.ropes)
    ropes[which] = replace(ropes[which], **changes)
    return replace(config, ropes=(ropes[0], ropes[1]))


def _wider(config: ModelConfig, by: int) -> ModelConfig:
    return replace(config, windows=tuple(w and w + by for w in config.windows))


SLIPS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "rope base": ("llama", lambda c: _other_rope(c, 0, base=11_000.0)),
    "rope scaling": ("llama-rope3-bias", lambda c: _other_rope(c, 0, kind="default")),
    "rope scaling, one number": ("llama-rope3-bias", lambda c: _other_rope(c, 0, factor=7.0)),
    "linear scaling": ("llama-linear", lambda c: _other_rope(c, 0, factor=3.9)),
    "local rope base": ("gemma3", lambda c: _other_rope(c, 1, base=11_000.0)),
    "local rope is the global one": ("gemma3", lambda c: replace(c, ropes=(c.ropes[0],) * 2)),
    "window one wider": ("mistral-window", lambda c: _wider(c, 1)),
    "window one narrower": ("gemma3", lambda c: _wider(c, -1)),
    "window in the wrong layer": ("qwen2-window", lambda c: replace(c, windows=c.windows[::-1])),
    "embedding scale": ("gemma3", lambda c: replace(c, embedding_scale=7.9)),
    "attention scale": ("gemma3", lambda c: replace(c, attention_scale=32**-0.5)),
    "activation": ("gemma3", lambda c: replace(c, activation="silu")),
    "norm epsilon": ("qwen3", lambda c: replace(c, rms_eps=1e-3)),
}


def without(model: Model, *names: str) -> Model:
    """The model without some of each layer's weights."""
    layers = [replace(layer, **dict.fromkeys(names)) for layer in model.weights.layers]
    return replace(model, weights=replace(model.weights, layers=layers))


def difference(reference: Any, model: Model) -> float:
    run = run_paged(model, random_prompt(PROMPT_TOKENS), 1, chunk_tokens=PROMPT_TOKENS)
    return float((reference_logits(reference, run.token_ids) - run.logits).abs().max())


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_setting_is_seen(pair: Callable[[str], Pair], slip: str) -> None:
    """The comparison can fail: each small mistake moves logits well beyond the tolerance."""
    case, change = SLIPS[slip]
    reference, model = pair(case)
    assert difference(reference, replace(model, config=change(model.config))) > 0.01


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("qwen3", ("query_norm", "key_norm")),
        ("gemma3", ("key_norm",)),
        ("gemma3", ("post_ffn_norm",)),
        ("gemma3", ("post_attention_norm",)),
        ("qwen2", ("qkv_bias",)),
        ("llama-rope3-bias", ("attention_output_bias",)),
    ],
)
def test_a_forgotten_weight_is_seen(
    pair: Callable[[str], Pair], case: str, names: tuple[str, ...]
) -> None:
    reference, model = pair(case)
    assert difference(reference, without(model, *names)) > 0.01


def test_ropes_of_the_cases_are_really_different(pair: Callable[[str], Pair]) -> None:
    full, local = pair("gemma3")[1].config.ropes
    assert (full.base, local.base) == (1e6, 1e4)
    full, local = pair("gemma3-linear")[1].config.ropes
    assert full == RopeConfig(base=1e6, kind="linear", factor=8.0)
    assert local == RopeConfig(base=500.0)
