"""Every Triton kernel compiled for GPUs that are not there: what the interpreter cannot show.

``python tests/model/gpu_compile.py 80,90 64,128`` compiles for compute capabilities 8.0 and 9.0 and
these head sizes, and prints what each kernel takes. It needs Triton, no GPU, and no
TRITON_INTERPRET.
"""

import sys
from collections.abc import Mapping
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagemill.kernels.codec import FORMATS
from pagemill.kernels.layout import KvLayout
from pagemill.kernels.triton import launch
from pagemill.kernels.triton.attend import attend_kernel, merge_kernel
from pagemill.kernels.triton.rope import rope_kernel
from pagemill.kernels.triton.write import write_kernel

FLOATS = ("k_ptr", "v_ptr", "centers", "q_ptr", "out", "partial_acc", "partial_top", "partial_sum",
          "shifts", "sinks", "qkv", "q_norm", "k_norm")  # fmt: skip
BYTES = ("tiles", "tails", "scratch")
NUMBERS = {"scale": "fp32", "cap": "fp32", "eps": "fp32", "window": "i32"}
MAX_SHARED_BYTES = 99 << 10
"""What GPUs from compute capability 8.0 on give a program at least."""
INEXACT = ("fma.", "div.full", ".approx", ".ftz")
"""Instructions with which written bytes would differ from the CPU's."""
WIDE_COPY = ", 0x10"
"""An asynchronous copy of 16 bytes from the GPU's memory."""


def compile_kernel(
    kernel: Any, constants: Mapping[str, Any], capability: int, **options: Any
) -> Any:
    """The compiled kernel with these constants."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS or (name == "table" and kernel is rope_kernel):
            signature[name] = "*fp32"
        elif name in BYTES:
            signature[name] = "*u8"
        else:
            signature[name] = NUMBERS.get(name, "i64" if "stride" in name else "*i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
               if signature[n].startswith("*")}  # fmt: skip
    source = ASTSource(kernel, signature, dict(constants), aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attend_constants(layout: KvLayout, heads: int, tokens: int, is_split: bool) -> dict[str, Any]:
    how_k, how_v = launch.HOW[layout.kv_format]
    each = heads // layout.num_kv_heads
    return {
        **launch.format_constants(layout), **launch.tile_shape(layout, each, tokens),
        "H": heads, "K": layout.num_kv_heads, "HAS_SHIFT": True, "HAS_CAP": True,
        "HAS_SINKS": True, "IS_SPLIT": is_split, "HOW_K": how_k, "HOW_V": how_v,
    }  # fmt: skip


def compile_format(kv_format: str, dim: int, heads: int, kv_heads: int, capability: int) -> None:
    """All kernels of a format; an assertion where one would not fit the GPU."""
    layout = KvLayout(kv_format, 32, kv_heads, dim)
    constants = launch.format_constants(layout)
    made = {
        "write": compile_kernel(
            write_kernel, {**constants, "NUM_HEADS": kv_heads, "HAS_CENTERS": True},
            capability, enable_fp_fusion=False, num_warps=4)
    }  # fmt: skip
    if kv_format == "i8":  # of all formats the same, but for a rotation
        made["merge"] = compile_kernel(
            merge_kernel,
            {**{name: constants[name] for name in ("D", "DP", "LOG", "FACTOR", "ROTATES_V")},
             "H": heads, "HAS_SINKS": True, "AT_ONCE": 16}, capability, num_warps=4)  # fmt: skip
        made["rope"] = compile_kernel(
            rope_kernel, {"H": heads, **launch.rope_shapes(dim, dim), "HAS_Q_NORM": True,
                          "HAS_K_NORM": False}, capability, num_warps=1)  # fmt: skip
    for name, tokens, is_split in (("chunk", launch.CHUNK_TOKENS, False), ("single", 1, True)):
        shape = attend_constants(layout, heads, tokens, is_split)
        made[name] = compile_kernel(
            attend_kernel,
            shape,
            capability,
            num_warps=launch.num_warps(shape["TT"] * shape["HB"]),
            num_stages=launch.NUM_STAGES,
        )
    for name, kernel in made.items():
        shared = kernel.metadata.shared
        print(f"sm_{capability} {kv_format} D {dim} {name}: {shared} bytes shared, "
              f"{kernel.asm['ptx'].count(chr(10))} lines", flush=True)  # fmt: skip
        assert shared <= MAX_SHARED_BYTES, f"{name} does not fit"
    assert not [word for word in INEXACT if word in made["write"].asm["ptx"]]
    assert WIDE_COPY in made["single"].asm["ptx"], "the tiles are read in small pieces"


if __name__ == "__main__":
    dims = {64: (9, 3), 128: (32, 8), 256: (4, 1), 80: (4, 4), 512: (8, 1)}
    capabilities, asked = sys.argv[1].split(","), sys.argv[2].split(",")
    for capability, dim, kv_format in product(map(int, capabilities), map(int, asked), FORMATS):
        compile_format(kv_format, dim, *dims[dim], capability)
