"""A ``transformers`` model with the weights of a real GGUF file, read by the ``gguf`` package.

``transformers`` has a GGUF loader of its own, but it wants ``accelerate``, and for Gemma 3 it
leaves the base of the local rope and the kinds of layers to defaults. Here all is said.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

from model.gguf_files import ggml_name


def load_reference(path: Path) -> Any:
    """Float32, eager attention."""
    reader = gguf.GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("tok")}
    shape = {key: field.contents() for key, field in fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    arch = shape["general.architecture"]
    config = {"llama": _llama_config, "gemma3": _gemma_config}[arch](shape, tensors)
    config._attn_implementation = "eager"
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weight(tensors, config, name, arch))
    return model.eval()


def _sizes(shape: dict[str, Any], arch: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": shape[f"{arch}.embedding_length"],
        "intermediate_size": shape[f"{arch}.feed_forward_length"],
        "num_hidden_layers": shape[f"{arch}.block_count"],
        "num_attention_heads": shape[f"{arch}.attention.head_count"],
        "num_key_value_heads": shape[f"{arch}.attention.head_count_kv"],
        "rms_norm_eps": shape[f"{arch}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": shape[f"{arch}.context_length"],
        "tie_word_embeddings": True,
    }


def _llama_config(shape: dict[str, Any], tensors: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": shape["llama.rope.freq_base"]}
    return transformers.LlamaConfig(**_sizes(shape, "llama", tensors), rope_parameters=rope)


def _gemma_config(shape: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Facts that the file leaves out: every sixth layer is global, the local rope base is 10,000,
    scores are divided by the root of the head dim."""
    sizes = _sizes(shape, "gemma3", tensors)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return transformers.Gemma3TextConfig(
        **sizes,
        head_dim=shape["gemma3.attention.key_length"],
        query_pre_attn_scalar=shape["gemma3.attention.key_length"],
        sliding_window=shape["gemma3.attention.sliding_window"],
        layer_types=[kinds[i % 6] for i in range(sizes["num_hidden_layers"])],
        rope_parameters={
            "full_attention": {
                "rope_type": "default",
                "rope_theta": shape["gemma3.rope.freq_base"],
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )


def _weight(tensors: dict[str, Any], config: Any, name: str, arch: str) -> torch.Tensor:
    tensor = tensors[ggml_name(name, arch == "gemma3")]
    weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = heads.get(name.split(".")[-2])
    if arch == "llama" and num_heads:
        pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    if arch == "gemma3" and "norm" in name:
        weight = weight - 1.0
    return torch.from_numpy(np.ascontiguousarray(weight))
