"""Packed weights beside bfloat16 ones: the linear layers alone, and decoding of 16 sequences.

The linear layers of SmolLM2-135M in turn with the same weights packed, in bfloat16, and in torch's
packed int4 (group 32). Then two servers, which decode in turn: 16 prompts of 512 tokens, which are
cached, and 32 new tokens. Medians; the turns go round so that a busy machine is busy for all.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from common import finish, make_parser
from pagemill.kernels.linear import linear
from pagemill.kernels.packed import pack
from pagemill.kernels.threads import use_threads
from transformers_b16 import BATCH, NEW_TOKENS, PROMPT_TOKENS, Ours, prompts

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30
TOKENS = (1, 4, 16, 64)
ROUNDS, QUICK_ROUNDS = 9, 3

Product = Callable[[torch.Tensor], torch.Tensor]


def products(rng: np.random.Generator, num_rows: int, width: int) -> dict[str, Product]:
    """One matrix in each form, of random codes."""
    blocks = rng.integers(0, 256, (num_rows, width // 32, 20), dtype=np.uint8)
    blocks[:, :, :4] = np.array([0.01, -0.07], np.float16).view(np.uint8)
    packed = pack("Q4_1", torch.from_numpy(blocks.reshape(num_rows, -1)), width)
    wide = torch.cat([rows for _, rows in packed.wide_rows(torch.bfloat16)])
    codes = torch.from_numpy(rng.integers(0, 16, (num_rows, width), dtype=np.int32))
    int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(width // 32, num_rows, 2).bfloat16()

    def torch_int4(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), int4, 32, scales)
        return y.float()

    return {
        "packed": lambda x: linear(x, packed),
        "bf16": lambda x: linear(x, wide),
        "int4": torch_int4,
    }


def time_layers(rounds: int) -> dict[str, float]:
    """Milliseconds of all linear layers, by form and number of tokens."""
    rng = np.random.default_rng(0)
    layers = [products(rng, *shape) for _ in range(NUM_LAYERS) for shape in SHAPES]
    figures = {}
    for num_tokens in TOKENS:
        inputs = [torch.randn(num_tokens, width) for _, width in SHAPES] * NUM_LAYERS
        times: dict[str, list[float]] = {name: [] for name in layers[0]}
        for _ in range(rounds):
            for name, taken in times.items():
                start = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer[name](x)
                taken.append(time.perf_counter() - start)
        for name, taken in times.items():
            figures[f"{name}_ms_{num_tokens}"] = 1e3 * statistics.median(taken)
    return figures


def time_steps(model: str, rounds: int, num_threads: int) -> dict[str, float]:
    """Decode tokens/s of 16 sequences, packed and bfloat16 weights in turn."""
    flags = ("--threads", str(num_threads), "--weight-format")
    servers = {name: Ours(model, *flags, name) for name in ("packed", "bf16")}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    ids = prompts(random.Random(1), PROMPT_TOKENS)
    for server in servers.values():
        server.call(ids, 1)
    for _ in range(rounds):
        for name, server in servers.items():
            first, whole = server.call(ids, 1), server.call(ids, 1 + NEW_TOKENS)
            rates[name].append(BATCH * NEW_TOKENS / (whole - first))
    for server in servers.values():
        server.close()
    figures = {f"{name}_tps_b16": statistics.median(rate) for name, rate in rates.items()}
    pairs = zip(rates["packed"], rates["bf16"], strict=True)
    return {**figures, "packed_over_bf16_b16": statistics.median(a / b for a, b in pairs)}


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", choices=("layers", "steps"))
    return parser.parse_args()


def main() -> None:
    parsed = arguments()
    num_threads = use_threads(parsed.threads)
    rounds = QUICK_ROUNDS if parsed.quick else ROUNDS
    figures: dict[str, float] = {}
    keys: list[str] = []
    if parsed.only != "steps":
        figures |= time_layers(rounds)
        for num_tokens in TOKENS:
            packed = figures[f"packed_ms_{num_tokens}"]
            for other in ("bf16", "int4"):
                key = f"{other}_over_packed_{num_tokens}"
                figures[key] = figures[f"{other}_ms_{num_tokens}"] / packed
                keys.append(key)
    if parsed.only != "layers":
        figures |= time_steps(parsed.model, rounds, num_threads)
        keys.append("packed_over_bf16_b16")
    for name, value in figures.items():
        print(f"{name:28} {value:.4g}")
    finish(figures, tuple(keys), parsed.json)


if __name__ == "__main__":
    main()
