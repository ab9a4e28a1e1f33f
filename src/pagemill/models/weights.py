"""Weights under one set of names, from safetensors folders and GGUF files.

    embedding [V, N]   final_norm [N]   output [V, N] (the embedding where tied)
    layer: attention_norm [N]  qkv [(H + 2 K) D, N]  qkv_bias?  query_norm? [D]  key_norm? [D]
           attention_output [N, H D]  attention_output_bias?  post_attention_norm? [N]
           ffn_norm [N]  gate_up [2 I, N]  down [N, I]  post_ffn_norm? [N]

N hidden size, I intermediate size, V vocabulary; H, K, D as everywhere. Norm weights are those to
multiply with (Gemma's "1 + w" is added here); Q and K rows are stored for rotating halves.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemill.core.errors import ModelError
from pagemill.kernels.linear import Matrix, matrix_bytes
from pagemill.kernels.packed import PackedMatrix, can_pack, pack, row_bytes, stack
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
    qkv: Matrix
    attention_output: Matrix
    ffn_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    attention_output_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None


@dataclass(slots=True)
class Weights:
    """All weights of a decoder. ``rope_factors`` [D / 2] divide the frequencies of full layers."""

    embedding: Matrix
    final_norm: torch.Tensor
    output: Matrix
    layers: list[LayerWeights]
    rope_factors: torch.Tensor | None = None

    def num_bytes(self) -> int:
        """Bytes that a step must read: all matrices once, the output head included."""
        return sum(map(matrix_bytes, (self.output, *self._matrices())))

    def num_packed_bytes(self) -> int:
        """How many of those bytes are of matrices that stayed packed."""
        matrices = (self.output, *self._matrices())
        return sum(matrix_bytes(m) for m in matrices if isinstance(m, PackedMatrix))

    def num_matrix_parameters(self) -> int:
        """Parameters that each token is multiplied with in the layers, without the output head."""
        return sum(matrix.numel() for matrix in self._matrices())

    def _matrices(self) -> Iterator[Matrix]:
        for layer in self.layers:
            yield from (layer.qkv, layer.attention_output, layer.gate_up, layer.down)


FetchBlocks = Callable[[str], tuple[str, torch.Tensor] | None]
"""The GGUF type and the blocks of a tensor, uint8 [rows, bytes]; None where it has none."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a matrix under a name of the file. ``num_heads``: rows of pairs, to be put into
    halves; 0: as they are."""

    name: str
    num_rows: int
    num_heads: int = 0


class _Source:
    """Tensors by canonical name, whatever file they come from."""

    def __init__(
        self,
        config: ModelConfig,
        fetch: Callable[[str], torch.Tensor | None],
        dtype: torch.dtype,
        fetch_blocks: FetchBlocks | None = None,
    ) -> None:
        self._config = config
        self._fetch = fetch
        self._fetch_blocks = fetch_blocks
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

    def matrix(self, parts: Sequence[_Part], width: int) -> Matrix:
        """The parts, one under the other: packed where all of them can be, else ``dtype``."""
        packed = [self._packed(part, width) for part in parts]
        whole = [matrix for matrix in packed if matrix is not None]
        if len(whole) == len(parts):
            return stack(whole)
        dense = []
        for part in parts:
            tensor = self.tensor(part.name, (part.num_rows, width)).to(self._dtype)
            dense.append(_halves(tensor, part.num_heads) if part.num_heads else tensor)
        return torch.cat(dense) if len(dense) > 1 else dense[0]

    def _packed(self, part: _Part, width: int) -> PackedMatrix | None:
        """None where the file has no packed rows of this shape; ``tensor`` then says why."""
        found = self._fetch_blocks(part.name) if self._fetch_blocks else None
        if found is None:
            return None
        kind, rows = found
        if not can_pack(kind, width) or tuple(rows.shape) != (
            part.num_rows,
            row_bytes(kind, width),
        ):
            return None
        self._used.add(part.name)
        return pack(kind, _halves(rows, part.num_heads) if part.num_heads else rows, width)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.tensor(name, (size,)).float() + self._config.norm_offset

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.tensor(name, (size,)).float()


def load_gguf(
    file: GgufFile,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    stays_packed: bool = False,
) -> Weights:
    """Weights of a GGUF file, decoded to ``dtype``, or left packed where that can be. Raises
    ModelError."""

    def fetch(name: str) -> torch.Tensor | None:
        if name not in file.tensors:
            return None
        return torch.from_numpy(file.load(name))

    def fetch_blocks(name: str) -> tuple[str, torch.Tensor] | None:
        tensor = file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            return None
        blocks = np.frombuffer(file.raw(name), np.uint8).reshape(tensor.shape[0], -1)
        with warnings.catch_warnings():  # the file is mapped to be read, and is only read
            warnings.simplefilter("ignore", UserWarning)
            return tensor.type, torch.from_numpy(blocks)

    source = _Source(config, fetch, dtype, fetch_blocks if stays_packed else None)
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
    embedding = source.matrix([_Part(top[0], vocab)], hidden)
    tied = config.tied_output
    output = embedding if tied else source.matrix([_Part(top[2], vocab)], hidden)
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

    def part(kind: str) -> _Part:
        return _Part(f"{names[kind]}.weight", rows[kind], heads[kind] if _swap(kind) else 0)

    def bias(kind: str) -> torch.Tensor:
        vector = source.vector(f"{names[kind]}.bias", rows[kind])
        return _halves(vector, heads[kind]) if _swap(kind) else vector

    def _swap(kind: str) -> bool:
        return config.interleaved_rope and kind in heads

    return LayerWeights(
        attention_norm=source.norm(names["attention_norm"], hidden),
        qkv=source.matrix([part(k) for k in "qkv"], hidden),
        attention_output=source.matrix([_Part(f"{names['o']}.weight", hidden)], q_rows),
        ffn_norm=source.norm(names["ffn_norm"], hidden),
        gate_up=source.matrix([_Part(names[k], inner) for k in ("gate", "up")], hidden),
        down=source.matrix([_Part(names["down"], hidden)], inner),
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
