"""Weights under one set of names, from safetensors folders and GGUF files.

    embedding [V, N]   final_norm [N]   output [V, N] (the embedding where tied)
    layer: attention_norm [N]  qkv [(H + 2 K) D, N]  qkv_bias?  query_norm? [D]  key_norm? [D]
           attention_output [N, H D]  attention_output_bias?  post_attention_norm? [N]
           ffn_norm [N]  gate_up [2 I, N]  down [N, I]  post_ffn_norm? [N]

N hidden size, I intermediate size, V vocabulary; H, K, D as everywhere. Norm weights are those to
multiply with (Gemma's "1 + w" is added here); Q and K rows are stored for rotating halves.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from pagemill.core.errors import ModelError
from pagemill.models.config import ModelConfig
from pagemill.models.gguf import GgufFile

HARMLESS = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")
"""Ends of the names of tensors that old files store and everyone computes instead."""
OTHER_SENSES = ("vision_tower.", "multi_modal_projector.")
"""Parts of a multimodal checkpoint that read images; text never comes there."""
MAX_NAMED = 4

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""


@dataclass(slots=True)
class LayerWeights:
    """The weights of one layer, as listed above."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    attention_output_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None

    def to(self, device: torch.device) -> "LayerWeights":
        """The same tensors on a device."""
        there = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {k: x if x is None else x.to(device) for k, x in there.items()}
        return LayerWeights(**moved)


@dataclass(slots=True)
class Weights:
    """All weights of a decoder. ``rope_factors`` [D / 2] divide the frequencies of full layers."""

    embedding: torch.Tensor
    final_norm: torch.Tensor
    output: torch.Tensor
    layers: list[LayerWeights]
    rope_factors: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Weights":
        """The same weights on a device; a tied output stays the embedding."""
        moved = Weights(
            embedding=self.embedding.to(device),
            final_norm=self.final_norm.to(device),
            output=self.output,
            layers=[layer.to(device) for layer in self.layers],
            rope_factors=self.rope_factors,
        )
        is_tied = self.output.data_ptr() == self.embedding.data_ptr()
        moved.output = moved.embedding if is_tied else self.output.to(device)
        return moved

    def num_bytes(self) -> int:
        """Bytes that a step must read: all matrices once, the output head included."""
        total = self.output.numel() * self.output.element_size()
        for layer in self.layers:
            for matrix in (layer.qkv, layer.attention_output, layer.gate_up, layer.down):
                total += matrix.numel() * matrix.element_size()
        return total

    def num_matrix_parameters(self) -> int:
        """Parameters that each token is multiplied with in the layers, without the output head."""
        return sum(
            matrix.numel()
            for layer in self.layers
            for matrix in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        )


class _Source:
    """Tensors by canonical name, whatever file they come from."""

    def __init__(
        self,
        config: ModelConfig,
        fetch: Callable[[str], torch.Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._fetch = fetch
        self._dtype = dtype
        self._used: set[str] = set()

    def refuse_unused(self, names: Iterable[str], *but: str) -> None:
        """Whoever stored a tensor computes with it: without it this would be another model."""
        unused = sorted(
            name
            for name in names
            if name not in self._used
            and name not in but
            and not name.endswith(HARMLESS)
            and not name.startswith(OTHER_SENSES)
        )
        if unused:
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            raise ModelError(
                f"the model's files hold tensors that pagemill's {self._config.family} decoder does"
                f" not use: {', '.join(unused[:MAX_NAMED])}{more}. It is another kind of model, or"
                " its config belongs to another one; pagemill would compute it wrongly"
            )

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._used.add(name)
        found = self._fetch(name)
        if found is None:
            raise ModelError(
                f"the model's files have no tensor {name!r}: the download is incomplete, or the"
                " config belongs to another model; get both again"
            )
        if tuple(found.shape) != shape:
            raise ModelError(
                f"tensor {name!r} has the shape {tuple(found.shape)}, the config says {shape}:"
                " weights and config do not belong together; get both again"
            )
        return found

    def matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.tensor(name, shape).to(self._dtype)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.tensor(name, (size,)).float() + self._config.norm_offset

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.tensor(name, (size,)).float()


def load_gguf(
    file: GgufFile, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Weights of a GGUF file, decoded to ``dtype``. Raises ModelError."""

    def fetch(name: str) -> torch.Tensor | None:
        if name not in file.tensors:
            return None
        return torch.from_numpy(file.load(name))

    source = _Source(config, fetch, dtype)
    names = {
        "attention_norm": "attn_norm.weight",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "query_norm": "attn_q_norm.weight",
        "key_norm": "attn_k_norm.weight",
        "post_attention_norm": "post_attention_norm.weight",
        "ffn_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
        "post_ffn_norm": "post_ffw_norm.weight",
    }
    top = ("token_embd.weight", "output_norm.weight", "output.weight")
    weights = _assemble(source, config, "blk.{}.", names, top, progress)
    factors = fetch("rope_freqs.weight")
    weights.rope_factors = None if factors is None else factors.float()
    source.refuse_unused(file.tensors, "rope_freqs.weight")
    return weights


def load_safetensors(
    folder: Path, config: ModelConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Weights of a Hugging Face folder with ``*.safetensors``. Raises ModelError."""
    import safetensors

    paths = _weight_files(folder)
    try:
        files: list[Any] = [safetensors.safe_open(str(p), framework="pt") for p in paths]
        where = {_plain(name): (file, name) for file in files for name in file.keys()}
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(
            f"a safetensors file in {folder} is damaged or cut off ({error}): get it again"
        ) from error

    def fetch(name: str) -> torch.Tensor | None:
        if name not in where:
            return None
        file, stored = where[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    gemma = config.family == "gemma3"
    names = {
        "attention_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "query_norm": "self_attn.q_norm.weight",
        "key_norm": "self_attn.k_norm.weight",
        "post_attention_norm": "post_attention_layernorm.weight",
        "ffn_norm": ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
        + ".weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "post_ffn_norm": "post_feedforward_layernorm.weight",
    }
    top = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
    source = _Source(config, fetch, dtype)
    weights = _assemble(source, config, "layers.{}.", names, top, progress)
    source.refuse_unused(where, *(top[2:] if config.tied_output else ()))
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, else ``model.safetensors``, else whatever is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ModelError(f"{index} is damaged ({error!r}): get it again") from error
        missing = [name for name in names if not (folder / str(name)).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(map(str, missing))}, which its index names: the"
                " download is incomplete, get the rest"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{folder} has no *.safetensors file, and pagemill reads no pickled weights (*.bin,"
            " *.pth): save the model with safe_serialization, or use a GGUF file"
        )
    return paths


def _plain(name: str) -> str:
    """``model.language_model.layers.0...``, ``language_model.model...``: all to ``layers.0...``."""
    while name.startswith(("language_model.", "model.")):
        name = name.partition(".")[2]
    return name


def _assemble(
    source: _Source,
    config: ModelConfig,
    layer_prefix: str,
    names: dict[str, str],
    top: tuple[str, str, str],
    progress: Progress | None,
) -> Weights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = source.matrix(top[0], (vocab, hidden))
    output = embedding if config.tied_output else source.matrix(top[2], (vocab, hidden))
    layers = []
    for i in range(config.num_layers):
        prefix = layer_prefix.format(i)
        layers.append(_layer(source, config, {k: prefix + v for k, v in names.items()}))
        if progress:
            progress(i + 1, config.num_layers)
    return Weights(embedding, source.norm(top[1], hidden), output, layers)


def _layer(source: _Source, config: ModelConfig, names: dict[str, str]) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def part(kind: str) -> torch.Tensor:
        matrix = source.matrix(f"{names[kind]}.weight", (rows[kind], hidden))
        return _halves(matrix, heads[kind]) if _swap(kind) else matrix

    def bias(kind: str) -> torch.Tensor:
        vector = source.vector(f"{names[kind]}.bias", rows[kind])
        return _halves(vector, heads[kind]) if _swap(kind) else vector

    def _swap(kind: str) -> bool:
        return config.interleaved_rope and kind in heads

    gate_up = [source.matrix(names[k], (inner, hidden)) for k in ("gate", "up")]
    return LayerWeights(
        attention_norm=source.norm(names["attention_norm"], hidden),
        qkv=torch.cat([part(k) for k in "qkv"]),
        attention_output=source.matrix(f"{names['o']}.weight", (hidden, q_rows)),
        ffn_norm=source.norm(names["ffn_norm"], hidden),
        gate_up=torch.cat(gate_up),
        down=source.matrix(names["down"], (hidden, inner)),
        qkv_bias=torch.cat([bias(k) for k in "qkv"]) if config.qkv_bias else None,
        attention_output_bias=source.vector(f"{names['o']}.bias", hidden)
        if config.output_bias
        else None,
        query_norm=source.norm(names["query_norm"], head_dim) if config.qk_norm else None,
        key_norm=source.norm(names["key_norm"], head_dim) if config.qk_norm else None,
        post_attention_norm=source.norm(names["post_attention_norm"], hidden)
        if config.post_norms
        else None,
        post_ffn_norm=source.norm(names["post_ffn_norm"], hidden) if config.post_norms else None,
    )


def _halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of pairs (2i, 2i + 1) to rows of halves (i, i + D / 2), head by head."""
    half = rows.shape[0] // num_heads // 2
    paired = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape).contiguous()
