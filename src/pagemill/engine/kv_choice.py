"""What the KV cache of a model is like: a format for each layer, centers of the keys, sizes."""

import hashlib
from collections.abc import Sequence

import torch

from pagemill.core.config import EngineConfig
from pagemill.core.errors import ConfigError
from pagemill.core.layers import LayerGroup
from pagemill.kernels.codec import FORMATS
from pagemill.kernels.layout import KvLayout
from pagemill.models.config import ModelConfig
from pagemill.models.rope import inverse_frequencies
from pagemill.models.weights import Weights

LAYOUT_VERSION = 2
"""Changes when bytes of a tile change their meaning; it is part of every cached prefix's key."""

SKIPPED_FORMAT = "bf16"


def kv_formats(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """The format of each layer: the one asked for, bf16 in layers that are to be skipped."""
    name = config.kv_format
    if name == "auto":
        name = "bf16" if dtype == torch.bfloat16 else "fp32"
    skipped = skipped_layers(config.kv_skip_layers, model)
    return tuple(SKIPPED_FORMAT if i in skipped else name for i in range(model.num_layers))


def skipped_layers(names: Sequence[str], model: ModelConfig) -> set[int]:
    """Layers named by ``--kv-skip-layers``: numbers, ranges as 0-2, -1 for the last, or ``window``.
    ConfigError for a layer that the model does not have."""
    skipped: set[int] = set()
    for name in names:
        if name == "window":
            skipped |= {i for i, window in enumerate(model.windows) if window is not None}
            continue
        first, dash, last = name.partition("-") if not name.startswith("-") else (name, "", "")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ConfigError(
                f"kv_skip_layers: {name!r} is neither a layer, nor a range as 0-2, nor 'window'"
            ) from None
        low, high = (i + model.num_layers if i < 0 else i for i in (low, high))
        if not 0 <= low <= high < model.num_layers:
            raise ConfigError(
                f"kv_skip_layers: {name!r} lies outside of the {model.num_layers} layers"
            )
        skipped |= set(range(low, high + 1))
    return skipped


def name_formats(formats: Sequence[str]) -> str:
    """``i8``, or ``i8, 4 of 30 layers bf16``."""
    main = max(formats, key=lambda name: (name != SKIPPED_FORMAT, formats.count(name)))
    others = sum(name != main for name in formats)
    return f"{main}, {others} of {len(formats)} layers {SKIPPED_FORMAT}" if others else main


def key_centers(model: ModelConfig, weights: Weights) -> torch.Tensor | None:
    """The constant part of every key: float32 [layers, K, D], or None where keys have no bias.

    A key is rope(W x + b); its part rope(b) depends on the position alone, and in the slow channels
    hardly on that. The mean over all positions of the model is taken off before a key is coded:
    softmax does not change, and models with large biases (Qwen 2.5) lose nothing by coding.
    """
    if not model.qkv_bias:
        return None
    layers = []
    full, local = model.ropes
    means = {local: _mean_rotation(model, 1, weights), full: _mean_rotation(model, 0, weights)}
    for layer, window in zip(weights.layers, model.windows, strict=True):
        assert layer.qkv_bias is not None
        cosine, sine = means[model.ropes[window is not None]]
        first = model.num_heads * model.head_dim
        bias = layer.qkv_bias[first : first + model.num_kv_heads * model.head_dim].double()
        bias = bias.view(model.num_kv_heads, model.head_dim)
        half = len(cosine)
        low, high, rest = bias[:, :half], bias[:, half : 2 * half], bias[:, 2 * half :]
        turned = (low * cosine - high * sine, high * cosine + low * sine, rest)
        layers.append(torch.cat(turned, 1).float())
    return torch.stack(layers)


def _mean_rotation(
    model: ModelConfig, index: int, weights: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cosine and sine of each pair of channels over all positions: float64 [D / 2]."""
    factors = weights.rope_factors if index == 0 else None
    frequencies = inverse_frequencies(model.ropes[index], model.head_dim, factors).double()
    # the sum of cos(p w) over p < P is sin(P w / 2) / sin(w / 2) cos((P - 1) w / 2)
    count = model.max_positions
    mean = (frequencies * count / 2).sin() / (frequencies / 2).sin() / count
    middle = frequencies * (count - 1) / 2
    return mean * middle.cos(), mean * middle.sin()


def describe_kv(formats: Sequence[str], centers: torch.Tensor | None, block_size: int) -> str:
    """All that decides what the bytes of a page mean, for the fingerprint of the model."""
    digest = "none" if centers is None else hashlib.sha256(centers.numpy().tobytes()).hexdigest()
    return f"layout {LAYOUT_VERSION}, block {block_size}, {' '.join(formats)}, center {digest}"


def block_bytes(
    model: ModelConfig, group: LayerGroup, formats: Sequence[str], block_size: int
) -> int:
    """Bytes of a block of a layer group."""
    return sum(_layout(model, formats[layer], block_size).tile_bytes for layer in group.layers)


def tokens_per_gib(model: ModelConfig, block_size: int) -> str:
    """How many tokens fit into a GiB in each format, for a person. (A window layer keeps a token
    only while it is inside the window; here all layers count.)"""
    counts = []
    for name in FORMATS:
        tile = _layout(model, name, block_size).tile_bytes * model.num_layers
        counts.append(f"{name} {(1 << 30) * block_size // tile:,}")
    return "tokens in 1 GiB of KV: " + ", ".join(counts)


def tail_bytes(model: ModelConfig, formats: Sequence[str]) -> int:
    """Bytes of one sequence's tail slots in all layers; 0 where tokens are coded one by one."""
    return sum(_layout(model, name, 16).tail_bytes for name in formats)


def _layout(model: ModelConfig, kv_format: str, block_size: int) -> KvLayout:
    return KvLayout(kv_format, block_size, model.num_kv_heads, model.head_dim)
