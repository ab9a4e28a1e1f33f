"""Rotary position tables (RoFormer, arXiv 2104.09864), with the scalings that the families use."""

import math

import torch

from pagemill.models.config import RopeConfig

FLOAT32_BYTES = 4


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [D / 2]: the angle that one position adds in each pair of channels."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.base**exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    return frequencies if factors is None else frequencies / factors


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    waves = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((rope.original_positions / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def cos_sin_table(
    rope: RopeConfig, head_dim: int, num_positions: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [P, D]: the first half of a row are cosines, the second half sines."""
    positions = torch.arange(num_positions, dtype=torch.int64).float()
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, factors))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def table_bytes(ropes: tuple[RopeConfig, RopeConfig], head_dim: int, num_positions: int) -> int:
    """Memory that the tables of a decoder take while they are built: each is made in two halves,
    from angles, and both are there when the second is joined."""
    one = num_positions * head_dim * FLOAT32_BYTES
    return (len(set(ropes)) + 2) * one
