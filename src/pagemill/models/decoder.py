"""One decoder for every family: Llama, Mistral, SmolLM, Qwen2, Qwen3, Gemma 3.

What differs between families is data in ModelConfig (QK norm, biases, windows, post norms, scales),
not code. Activations and sums are float32; weights may be bfloat16. Knows no request and no plan.
"""

from dataclasses import dataclass

import torch

from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.device import CpuKernels, Kernels
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.linear import embed
from pagemill.models.config import ModelConfig
from pagemill.models.rope import cos_sin_table
from pagemill.models.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a step, packed, sequence after sequence.

    ``token_ids`` int64 [T], ``positions`` int32 [T]; per layer group ``slots`` int32 [T] says where
    a token's KV is written and ``attention`` which blocks its sequence reads.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    attention: tuple[AttentionBatch, ...]


class Decoder:
    """The forward pass over paged KV. ``weights`` lie on the device of ``kernels``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_positions: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.num_positions = num_positions
        self.kernels = kernels or CpuKernels()
        full, local = config.ropes
        head_dim = config.head_dim
        device, factors = self.kernels.device, weights.rope_factors
        factors = None if factors is None else factors.cpu()
        self._cos_sin = cos_sin_table(full, head_dim, num_positions, factors).to(device)
        self._local_cos_sin = (
            self._cos_sin
            if local == full
            else cos_sin_table(local, head_dim, num_positions).to(device)
        )
        self._group_of_layer = {
            layer: index
            for index, group in enumerate(config.layer_groups)
            for layer in group.layers
        }

    def forward(self, batch: TokenBatch, storage: KVStorage) -> torch.Tensor:
        """Final hidden states, normed: float32 [T, N]. Writes the KV of every token."""
        config = self.config
        batch = self._prepare(batch, storage)
        x = embed(batch.token_ids, self.weights.embedding)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        for index, layer in enumerate(self.weights.layers):
            x = self._layer(index, layer, x, batch, storage)
        return self.kernels.rms_norm(x, self.weights.final_norm, config.rms_eps)

    def _prepare(self, batch: TokenBatch, storage: KVStorage) -> TokenBatch:
        """The step where the kernels want it."""
        kernels = self.kernels
        return TokenBatch(
            token_ids=batch.token_ids.to(kernels.device),
            positions=batch.positions.to(kernels.device),
            slots=batch.slots,
            attention=tuple(
                kernels.prepare(attention, storage, group)
                for group, attention in enumerate(batch.attention)
            ),
        )

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        batch: TokenBatch,
        storage: KVStorage,
    ) -> torch.Tensor:
        config, eps = self.config, self.config.rms_eps
        rms_norm, linear = self.kernels.rms_norm, self.kernels.linear
        attended = self._attend(
            index, layer, rms_norm(x, layer.attention_norm, eps), batch, storage
        )
        if layer.post_attention_norm is not None:
            attended = rms_norm(attended, layer.post_attention_norm, eps)
        x = x + attended
        gate_up = linear(rms_norm(x, layer.ffn_norm, eps), layer.gate_up)
        out = linear(self.kernels.gate(gate_up, config.activation), layer.down)
        if layer.post_ffn_norm is not None:
            out = rms_norm(out, layer.post_ffn_norm, eps)
        return x + out

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        batch: TokenBatch,
        storage: KVStorage,
    ) -> torch.Tensor:
        config, kernels = self.config, self.kernels
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        group, window = self._group_of_layer[index], config.windows[index]
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), num_heads + 2 * num_kv_heads, config.head_dim)
        q = kernels.rope_and_write(
            qkv,
            self._cos_sin if window is None else self._local_cos_sin,
            batch.positions,
            batch.slots[group],
            storage,
            index,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=config.rms_eps,
            batch=batch.attention[group],
        )
        out = kernels.paged_attention(
            q,
            storage,
            index,
            batch.attention[group],
            scale=config.attention_scale,
            window=window,
            softcap=config.attention_softcap,
        )
        out = out.view(len(x), -1)
        return kernels.linear(out, layer.attention_output, layer.attention_output_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, V] of hidden states [rows, N]."""
        logits = self.kernels.linear(hidden, self.weights.output)
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
