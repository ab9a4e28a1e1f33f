"""Small steps of a decoder layer, each as one compiled call: torch's own cost 5-10 us an operation.

All arrays are float32, contiguous, in host memory; TypeError or ValueError where they are not.
"""

import torch
from torch import Tensor

from pagemill import _native
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: [T, N] of [T, N] and [N]."""
    out = torch.empty_like(x)
    _native.rms_norm(x, weight, eps, out)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, N] of [T, 2 N] = gate | up."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _native.silu_mul(gate_up, out)
    return out


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, the tanh form of GELU: [T, N] of [T, 2 N] = gate | up."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _native.gelu_tanh_mul(gate_up, out)
    return out


def rope_and_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    storage: KVStorage,
    layer: int,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    batch: AttentionBatch | None = None,
) -> Tensor:
    """Norm the heads of q and k where asked, rotate them in place, store k and v in their tiles.

    ``qkv`` [T, H + 2 K, D]: heads of q, k, v. ``cos_sin`` [P, R]: R / 2 cosines, then R / 2 sines
    of each position; channels (i, i + R / 2) turn together (GPT-NeoX order), those from R on stay.
    ``positions``, ``slots`` int32 [T], a slot = block id * B + offset. Norm weights [D]. Returns
    the view [T, H, D] of q. ValueError where a slot or position lies outside. ``batch`` is for
    formats that code whole groups (``KVStorage.write_step``).
    """
    group, index = storage.place(layer)
    storage.native[group].rotate_and_write(
        index, qkv, cos_sin, positions, slots, query_norm, key_norm, eps
    )
    num_kv_heads = storage.num_kv_heads
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if storage.layouts[layer].format.codes_whole_groups:
        assert batch is not None, "this format is written with its sequences"
        k, v = torch.split(qkv[:, num_heads:], num_kv_heads, 1)
        storage.write_step(layer, k, v, batch)
    return qkv[:, :num_heads]
