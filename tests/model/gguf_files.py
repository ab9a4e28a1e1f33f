"""Small GGUF files of every family, written with the ``gguf`` package from random checkpoints.

The reference model is given the numbers that the file's blocks decode to, so that what is left to
compare is pagemill's reading and computing, not the loss of the number format.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from model.checkpoints import tiny_tokenizer

Array = NDArray[Any]
ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
        "gemma3_text": "gemma3"}  # fmt: skip
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
K_SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Where the half-precision scales of a block lie."""


def ggml_name(name: str, gemma: bool) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] != "layers":
        return f"{TOP_NAMES[parts[0]]}.{parts[-1]}"
    names = {**LAYER_NAMES, **(GEMMA_NAMES if gemma else {})}
    return f"blk.{parts[1]}.{names['.'.join(parts[2:-1])]}.{parts[-1]}"


def coded(weight: Array, kind: Kind) -> Array:
    """The blocks of a matrix. The k-quants have no coder here: random blocks of the same spread."""
    if kind not in K_SCALES:
        return gguf.quantize(weight, kind)
    rng = np.random.default_rng(weight.shape[0])
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = weight.shape[1] // values
    blocks = rng.integers(0, 256, (weight.shape[0] * num_blocks, num_bytes), dtype=np.uint8)
    spread = weight.std() / {Kind.Q4_K: 250.0, Kind.Q5_K: 500.0, Kind.Q6_K: 1400.0}[kind]
    for offset in K_SCALES[kind]:
        scales = (spread * (1 + rng.random(len(blocks)))).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(weight.shape[0], -1)


def permuted(rows: Array, num_heads: int) -> Array:
    """Rows of halves (i, i + D / 2) to pairs (2 i, 2 i + 1), as llama-type files store Q and K."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(model: Any, path: Path, kind_of: Callable[[str], Kind], **extra: Any) -> Path:
    """The model as a GGUF file; the model's own matrices become what the file decodes to.

    ``kind_of`` chooses the type of a matrix by its ggml name; vectors are F32. ``extra`` are more
    metadata keys, with dots written as ``__``.
    """
    config = model.config
    arch = ARCH[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _add_shape(writer, config, arch)
    _add_tokenizer(writer)
    for key, value in extra.items():
        _add(writer, key.replace("__", "."), value)
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        assert not (tied and name == "lm_head.weight")
        _add_tensor(writer, config, name, parameter, kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def _add_shape(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, head_dim, rope))
    if arch == "gemma3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


def _llama3_factors(config: Any, head_dim: int, rope: dict[str, Any]) -> Array:
    """What llama.cpp's converter writes: the factor by which each frequency is divided."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = json.loads(tiny_tokenizer().to_str())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")


def _add_tensor(
    writer: gguf.GGUFWriter,
    config: Any,
    name: str,
    parameter: torch.nn.Parameter,
    kind_of: Callable[[str], Kind],
) -> None:
    gemma = config.model_type == "gemma3_text"
    target = ggml_name(name, gemma)
    weight = parameter.detach().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = heads.get(name.split(".")[-2]) if ARCH[config.model_type] == "llama" else None
    if weight.ndim == 1:
        weight = weight + 1.0 if gemma else weight
        writer.add_tensor(target, permuted(weight, num_heads) if num_heads else weight.copy())
        return
    kind = kind_of(target)
    rows = coded(weight, kind)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(gguf.dequantize(rows, kind).reshape(weight.shape)))
    rows = permuted(rows, num_heads) if num_heads else rows
    writer.add_tensor(target, rows, raw_dtype=kind)
