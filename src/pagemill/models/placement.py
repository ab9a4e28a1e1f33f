"""Weights on the device that computes."""

from dataclasses import fields
from typing import Any

import torch

from pagemill.kernels.linear import Matrix
from pagemill.models.weights import LayerWeights, Weights


def weights_on(weights: Weights, device: torch.device) -> Weights:
    """The same weights on a device; a tied output stays the embedding. Not for packed ones."""
    if device.type == "cpu":
        return weights
    embedding, output = _move(weights.embedding, device), weights.output
    assert isinstance(weights.embedding, torch.Tensor) and isinstance(output, torch.Tensor)
    is_tied = output.data_ptr() == weights.embedding.data_ptr()
    return Weights(
        embedding=embedding,
        final_norm=weights.final_norm.to(device),
        output=embedding if is_tied else output.to(device),
        layers=[_layer_on(layer, device) for layer in weights.layers],
        rope_factors=weights.rope_factors,
    )


def _layer_on(layer: LayerWeights, device: torch.device) -> LayerWeights:
    there = {each.name: getattr(layer, each.name) for each in fields(layer)}
    moved: dict[str, Any] = {k: x if x is None else _move(x, device) for k, x in there.items()}
    return LayerWeights(**moved)


def _move(matrix: Matrix, device: torch.device) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "packed weights stay in host memory"
    return matrix.to(device)
