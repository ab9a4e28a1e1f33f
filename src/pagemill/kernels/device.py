"""What a decoder computes with: the kernels of one device behind one contract."""

from typing import Protocol

import torch
from torch import Tensor

from pagemill.core.layers import CacheConfig
from pagemill.kernels import attention_cpu, fused
from pagemill.kernels import linear as products
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.linear import Matrix


class Kernels(Protocol):
    """Tensors lie on ``device``; shapes and errors are those of ``fused``, ``linear`` and
    ``attention_cpu``. A storage and the batches made for it belong to one Kernels."""

    @property
    def device(self) -> torch.device: ...

    def make_storage(
        self,
        config: CacheConfig,
        kv_formats: str | tuple[str, ...],
        num_kv_heads: int,
        head_dim: int,
        *,
        centers: Tensor | None = None,
        num_tails: int = 0,
    ) -> KVStorage: ...

    def prepare(self, batch: AttentionBatch, storage: KVStorage, group: int) -> AttentionBatch:
        """The batch as ``rope_and_write`` and ``paged_attention`` want it, once a step."""
        ...

    def wait(self) -> None:
        """Return once everything that was started is computed."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gate(self, gate_up: Tensor, activation: str) -> Tensor: ...

    def rope_and_write(
        self,
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
    ) -> Tensor: ...

    def paged_attention(
        self,
        q: Tensor,
        storage: KVStorage,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class CpuKernels:
    """The compiled kernels, as they are."""

    device = torch.device("cpu")
    make_storage = KVStorage
    linear = staticmethod(products.linear)
    rms_norm = staticmethod(fused.rms_norm)
    rope_and_write = staticmethod(fused.rope_and_write)
    paged_attention = staticmethod(attention_cpu.paged_attention)

    @staticmethod
    def prepare(batch: AttentionBatch, storage: KVStorage, group: int) -> AttentionBatch:
        return batch

    @staticmethod
    def wait() -> None:
        return None

    @staticmethod
    def gate(gate_up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return fused.silu_mul(gate_up)
        return fused.gelu_tanh_mul(gate_up)
