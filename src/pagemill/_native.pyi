"""Compiled parts of pagemill."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

# kernels

def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def adopt_openmp() -> bool: ...
def thread_runtime() -> Literal["openmp", "own"]: ...
def gguf_strings(buffer: Buffer, offset: int, count: int) -> tuple[list[str], int]: ...
def gguf_decode(type: str, data: Buffer, out: NDArray[np.float32]) -> None: ...
def gguf_block(type: str) -> tuple[int, int] | None: ...

class KvArena:
    def __init__(
        self,
        address: int,
        num_bytes: int,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_format: str,
    ) -> None: ...
    @property
    def tile_bytes(self) -> int: ...
    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None: ...
    def rotate_and_write(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
    ) -> None: ...
    def copy_blocks(self, pairs: NDArray[np.int64]) -> None: ...
    def attention(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        query_start: NDArray[np.int32],
        context_start: NDArray[np.int32],
        block_ids: NDArray[np.int32],
        indptr: NDArray[np.int32],
        scale: float,
        window: int,
        softcap: float,
    ) -> None: ...

def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
def silu_mul(gate_up: Tensor, out: Tensor) -> None: ...
def gelu_tanh_mul(gate_up: Tensor, out: Tensor) -> None: ...
def linear_bf16(x: Tensor, weight: Tensor, out: Tensor) -> None: ...
def widen_bf16(values: Tensor, out: Tensor) -> None: ...
def set_isa(name: str) -> bool: ...
def isa_name() -> str: ...
def isa_runs_here(name: str) -> bool: ...
