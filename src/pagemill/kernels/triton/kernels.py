"""The kernels of a decoder on a GPU: torch for products and norms, Triton for what pages need."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.core.layers import CacheConfig
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.linear import Matrix
from pagemill.kernels.triton.launch import Attention, launch_rope
from pagemill.kernels.triton.plan import DeviceBatch
from pagemill.kernels.triton.storage import TritonStorage


class TritonKernels:
    """``Kernels`` (``kernels/device.py``) on a CUDA device, or on the CPU under the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_storage(
        self,
        config: CacheConfig,
        kv_formats: str | tuple[str, ...],
        num_kv_heads: int,
        head_dim: int,
        *,
        centers: Tensor | None = None,
        num_tails: int = 0,
    ) -> KVStorage:
        return TritonStorage(
            config, kv_formats, num_kv_heads, head_dim,
            device=self.device, centers=centers, num_tails=num_tails,
        )  # fmt: skip

    def prepare(self, batch: AttentionBatch, storage: KVStorage, group: int) -> AttentionBatch:
        assert isinstance(storage, TritonStorage), "a storage of other kernels"
        return storage.prepare(batch, group)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """float32 [T, N]; with bfloat16 weights x is rounded to bfloat16, the sums stay float32."""
        assert isinstance(weight, Tensor), "packed weights are the CPU's"
        if weight.dtype != torch.bfloat16:
            return functional.linear(x, weight, bias)
        out = functional.linear(x.bfloat16(), weight).float()
        return out if bias is None else out.add_(bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

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
    ) -> Tensor:
        """As ``fused.rope_and_write``; where tokens go stands in ``batch``, not in ``slots``."""
        assert batch is not None, "a step is written with its sequences"
        num_kv_heads = storage.num_kv_heads
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        launch_rope(qkv, cos_sin, positions, num_kv_heads, query_norm, key_norm, eps)
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)
        storage.write_step(layer, k, v, batch)
        return q

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
    ) -> Tensor:
        """As ``attention_cpu.paged_attention``; shared runs of blocks are read by each sequence."""
        assert isinstance(storage, TritonStorage), "a storage of other kernels"
        if not isinstance(batch, DeviceBatch):
            batch = storage.prepare(batch, storage.place(layer)[0])
        assert batch.window == window, "the batch was prepared for another window"
        if q.shape[0] == 0:
            return torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return Attention(q, storage, layer, batch, scale, softcap, sinks).run()
