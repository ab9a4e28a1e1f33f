"""Configs: what ``transformers`` 4 and 5 and Gemma's short forms say, and what is refused."""

from typing import Any

import pytest

from pagemill.core.errors import ModelError
from pagemill.models.config import ModelConfig, RopeConfig, from_gguf, from_hugging_face

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a"] * 100,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 2048,
}


def hf(**changes: Any) -> ModelConfig:
    return from_hugging_face({**LLAMA, **changes})


def gguf(**changes: Any) -> ModelConfig:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return from_gguf({**GGUF, **changes}, frozenset())


def gemma(**changes: Any) -> dict[str, Any]:
    keys = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    keys["general.architecture"] = "gemma3"
    return {**keys, **{key.replace("__", "."): value for key, value in changes.items()}}


def test_defaults_of_an_old_llama() -> None:
    config = hf()
    assert (config.num_kv_heads, config.head_dim, config.tied_output) == (4, 16, False)
    assert config.ropes == (RopeConfig(), RopeConfig())
    assert config.windows == (None,) * 4
    assert config.attention_scale == 0.25


def test_rope_of_version_4_and_5_is_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512}  # fmt: skip
    old = hf(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = hf(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == older == new
    assert new.ropes[0] == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512)


def test_gemma_of_version_4_and_5_is_the_same() -> None:
    base = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16}
    old = from_hugging_face({**base, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                             "sliding_window": 512, "sliding_window_pattern": 6,
                             "rope_scaling": {"rope_type": "linear", "factor": 8.0}})  # fmt: skip
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 1e4}
    new = from_hugging_face({
        **base, "sliding_window": 512, "layer_types": kinds,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    })  # fmt: skip
    assert old == new
    assert old.windows == (512,) * 5 + (None, 512)
    assert [group.name for group in old.layer_groups] == ["full", "window(512)"]
    assert old.layer_groups[0].layers == (5,)
    assert old.attention_scale == 256**-0.5 and old.tied_output


def test_the_short_config_of_gemma_3_4b() -> None:
    """Its text_config holds six keys; all else is the default of Gemma3TextConfig."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    config = from_hugging_face(outer)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_positions) == (262_208, 131_072)
    assert config.ropes[0] == RopeConfig(base=1e6, kind="linear", factor=8.0)
    assert config.ropes[1] == RopeConfig(base=1e4)
    assert config.eos_token_ids == (1, 106)


def test_windows_are_used_only_where_the_config_says_so() -> None:
    assert hf(model_type="qwen2", sliding_window=32).windows == (None,) * 4
    some = hf(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=3)
    assert some.windows == (None, None, None, 32)
    assert hf(model_type="mistral", sliding_window=32).windows == (32,) * 4
    assert hf(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert hf(sliding_window=32).windows == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "family 'mamba' is not supported"),
        ({"model_type": None}, "family 'None'"),
        ({"hidden_size": None}, "no number 'hidden_size'"),
        ({"hidden_size": "big"}, "no number 'hidden_size'"),
        ({"num_attention_heads": 0}, "cannot be understood"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"num_key_value_heads": "x"}, "cannot be understood"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"rope_scaling": "yarn"}, "cannot be understood"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\).*GGUF"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]},
         "kind of 1 layers, of 4"),
        ({"eos_token_id": "two"}, "cannot be understood"),
    ],
)  # fmt: skip
def test_foreign_and_damaged_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        hf(**changes)


def test_gguf_keys() -> None:
    config = gguf(llama__attention__head_count_kv=2, llama__rope__freq_base=1e5)
    assert config.interleaved_rope and config.tied_output and config.num_kv_heads == 2
    assert config.ropes[0] == RopeConfig(base=1e5)
    assert gguf(tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7).eos_token_ids == (
        2,
        7,
    )


def test_gguf_windows_of_gemma() -> None:
    six = gemma(gemma3__attention__sliding_window=512, gemma3__block_count=7)
    assert from_gguf(six, frozenset()).windows == (512,) * 5 + (None, 512)
    pattern = gemma(
        gemma3__attention__sliding_window=512,
        gemma3__attention__sliding_window_pattern=[True, False, True, False],
        gemma3__rope__freq_base_swa=5e3,
    )
    config = from_gguf(pattern, frozenset())
    assert config.windows == (512, None, 512, None)
    assert config.ropes[1] == RopeConfig(base=5e3)
    assert not config.interleaved_rope
    assert from_gguf(gemma(), frozenset()).ropes[1] == RopeConfig(base=1e4)


def test_gguf_gemma_27b_divides_scores_by_its_own_dim() -> None:
    """62 layers: query_pre_attn_scalar is hidden size / heads (168), not the head dim (128)."""
    changes = {"gemma3__block_count": 62, "gemma3__attention__key_length": 128}
    config = from_gguf(
        gemma(**changes, gemma3__embedding_length=5376, gemma3__attention__head_count=32),
        frozenset(),
    )
    assert config.attention_scale == 168**-0.5 and config.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "rwkv"}, "family 'rwkv'"),
        ({"llama.block_count": None}, "no number 'llama.block_count'"),
        ({"llama.block_count": 1 << 31}, "block_count is"),
        ({"llama.attention.head_count": [4, 4]}, "no number"),
        ({"llama.attention.head_count_kv": [2, 2, 2, 2]}, "cannot be understood"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "only 8 of 16 channels"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.tokens": 5}, "cannot be understood"),
    ],
)
def test_foreign_and_damaged_gguf_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        gguf(**changes)
