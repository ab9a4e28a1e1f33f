"""Attention over paged KV in every format, against the rate at which this machine reads memory.

Decode: 16 sequences of 8,192 tokens, tables as runs of block ids, over several layers, so that no
cache holds them. A *share* is the bytes of KV over time, by the read rate taken before and after
each repetition (it moves). A *speedup* is the time of bf16 by that of the format, both taken in
turn. *shuffled*: block ids in random order, at head size 64 in groups of four, as time over runs.
*shared*: 16 sequences over one prefix of 8,192 tokens, unshared time by shared. *prefill*: a chunk
of 512 tokens behind 7,680, torch's scaled_dot_product_attention over contiguous bf16 by ours.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from common import finish, make_parser
from pagemill import _native
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.attention_cpu import paged_attention
from pagemill.kernels.batch import AttentionBatch, SharedBlocks
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.threads import use_threads

B = 16
SHAPES = {"d64": (64, 9, 3, 8), "d128": (128, 32, 8, 2)}  # head dim, heads, KV heads, layers
FORMATS = ("bf16", "i8", "k8v4", "i4c")
KEYS = (
    "bf16_share_d64", "bf16_shuffled_d64", "i8_speedup_d64", "k8v4_speedup_d64",
    "i4c_speedup_d64", "bf16_share_d128", "bf16_shuffled_d128", "i8_speedup_d128",
    "k8v4_speedup_d128", "i4c_speedup_d128", "shared_bf16", "shared_i8", "prefill_vs_sdpa",
)  # fmt: skip


@dataclass
class Case:
    """A call that is timed: one step of attention in all layers of a storage."""

    storage: KVStorage
    batch: AttentionBatch
    q: torch.Tensor
    num_layers: int

    def run(self) -> None:
        for layer in range(self.num_layers):
            paged_attention(self.q, self.storage, layer, self.batch, self.q.shape[2] ** -0.5)

    def kv_bytes(self) -> float:
        tokens = int((self.batch.context_start + np.diff(self.batch.query_start)).sum())
        return tokens * sum(self.storage.token_bytes(layer) for layer in range(self.num_layers))


def filled(kv_format: str, shape: tuple[int, int, int, int], num_tokens: int,
           num_sequences: int = 1, block_size: int = B) -> KVStorage:  # fmt: skip
    """Blocks 1 ... of all layers hold normal numbers, the same every 4,096 tokens."""
    dim, _, kv_heads, layers = shape
    num_blocks = num_tokens // block_size + 1
    config = CacheConfig((LayerGroup("g", tuple(range(layers))),), (num_blocks,), block_size)
    storage = KVStorage(config, kv_format, kv_heads, dim, num_tails=num_sequences)
    count = min(4096, num_tokens)
    k, v = torch.randn(count, kv_heads, dim), torch.randn(count, kv_heads, dim)
    table = np.arange(1, count // block_size + 1, dtype=np.int32)
    for layer in range(layers):
        if storage.has_tails:
            batch = AttentionBatch(int32([0, count]), int32([0]), table, int32([0, len(table)]),
                                   int32([0]))  # fmt: skip
            storage.write_step(layer, k, v, batch)
        else:
            storage.write_kv(layer, k, v, torch.arange(count) + block_size)
        tiles = storage.tiles(layer)
        for first in range(1 + len(table), num_blocks, len(table)):
            part = min(len(table), num_blocks - first)
            tiles[first : first + part] = tiles[1 : 1 + part]
    return storage


def int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(values, dtype=np.int32)


def decode(kv_format: str, shape: tuple[int, int, int, int], num_sequences: int, context: int,
           *, shuffled_by: int = 0) -> Case:  # fmt: skip
    """One token for each of the sequences, ``context`` tokens long."""
    storage = filled(kv_format, shape, num_sequences * context, num_sequences)
    ids = np.arange(1, num_sequences * context // B + 1)
    if shuffled_by:
        groups = ids.reshape(-1, shuffled_by)
        ids = groups[np.random.default_rng(0).permutation(len(groups))].ravel()
    each = context // B
    batch = AttentionBatch(
        int32(range(num_sequences + 1)),
        int32([context - 1] * num_sequences),
        int32(ids),
        int32([each * i for i in range(num_sequences + 1)]),
        int32(range(num_sequences)),
    )
    return Case(storage, batch, 2 * torch.randn(num_sequences, shape[1], shape[0]), shape[3])


_READ = torch.ones(64 << 20, dtype=torch.float32)


def read_rate() -> float:
    """Bytes a second of a sequential read by all threads."""
    start = time.perf_counter()
    _READ.sum()
    return _READ.nbytes / (time.perf_counter() - start)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times of each, taken one after the other, ``repeats`` times; the first round is not kept."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(repeats + 1):
        for name, work in works.items():
            taken = timed(work)
            if round_:
                times[name].append(taken)
    return times


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure_decode(name: str, parsed: argparse.Namespace, figures: dict[str, Any]) -> None:
    shape, group = SHAPES[name], 4 if name == "d64" else 1
    cases = {f: decode(f, shape, parsed.batch, parsed.context) for f in FORMATS}
    cases["shuffled"] = decode("bf16", shape, parsed.batch, parsed.context, shuffled_by=group)
    times: dict[str, list[float]] = {key: [] for key in cases}
    shares: dict[str, list[float]] = {key: [] for key in cases}
    for round_ in range(parsed.repeats + 1):
        for key, case in cases.items():
            before = read_rate()
            taken = timed(case.run)
            if round_:
                limit = (before + read_rate()) / 2
                times[key].append(taken)
                shares[key].append(case.kv_bytes() / taken / limit)
    for key, case in cases.items():
        rate = case.kv_bytes() / statistics.median(times[key]) / 1e9
        figures[f"{key}_share_{name}"] = statistics.median(shares[key])
        figures[f"{key}_ms_{name}"] = 1e3 * statistics.median(times[key]) / case.num_layers
        error = "" if key == "shuffled" else f", error {error_of(case):.4f}"
        print(f"{name} {key:8} {figures[f'{key}_ms_{name}']:8.3f} ms a layer, {rate:5.1f} GB/s,"
              f" {figures[f'{key}_share_{name}']:.0%} of the read rate{error}")  # fmt: skip
    for key in FORMATS[1:]:
        figures[f"{key}_speedup_{name}"] = median_ratio(times["bf16"], times[key])
    figures[f"bf16_shuffled_{name}"] = median_ratio(times["shuffled"], times["bf16"])


def error_of(case: Case) -> float:
    """Relative error of one sequence of 1,024 tokens against float64 over the same bytes. (i4c: its
    own group lies in an empty tail slot here, keys and values of 0.)"""
    layout, count = case.storage.layouts[0], 1024 // B
    one = AttentionBatch(int32([0, 1]), int32([1023]), case.batch.block_ids[:count],
                         int32([0, count]), int32([0]))  # fmt: skip
    q, scale = case.q[:1], case.q.shape[2] ** -0.5
    got = paged_attention(q, case.storage, 0, one, scale)[0].double()
    k, v = (
        x.flatten(0, 1).double()
        for x in layout.decode_tiles(case.storage.tiles(0)[one.block_ids.tolist()])
    )
    if case.storage.has_tails:
        k[-B:], v[-B:] = 0, 0
    each = q.shape[1] // k.shape[1]
    scores = torch.einsum("hd,thd->ht", q[0].double(), k.repeat_interleave(each, 1)) * scale
    want = torch.einsum("ht,thd->hd", scores.softmax(1), v.repeat_interleave(each, 1))
    return float((got - want).norm() / want.norm())


def measure_shared(parsed: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Every sequence has a block of its own behind the common prefix."""
    shape = (*SHAPES["d64"][:3], 1)
    blocks, count = parsed.context // B, parsed.batch
    for kv_format in ("bf16", "i8"):
        apart = decode(kv_format, shape, count, parsed.context)
        storage = filled(kv_format, shape, parsed.context + count * B)
        tables = [[*range(1, blocks + 1), blocks + 1 + i] for i in range(count)]
        batch = AttentionBatch(
            int32(range(count + 1)),
            int32([parsed.context + B - 1] * count),
            int32(tables).ravel(),
            int32([(blocks + 1) * i for i in range(count + 1)]),
            shared=SharedBlocks(int32([0, blocks]), int32(range(count)), int32([0, count])),
        )
        together = Case(storage, batch, apart.q, 1)
        times = in_turn({"apart": apart.run, "together": together.run}, 3 * parsed.repeats)
        figures[f"shared_{kv_format}"] = median_ratio(times["apart"], times["together"])
        taken = statistics.median(times["together"])
        flops = 4 * shape[0] * shape[1] * count * parsed.context
        figures[f"shared_{kv_format}_flops_s"] = flops / taken
        print(f"shared {kv_format}: {1e3 * statistics.median(times['apart']):.2f} ms apart,"
              f" {1e3 * taken:.2f} ms together, {flops / taken / 1e9:.0f} GFLOP/s")  # fmt: skip
    rate = torch.randn(1024, 1024).bfloat16()
    best = min(in_turn({"gemm": lambda: rate @ rate}, 5)["gemm"])
    print(
        f"bound of the pipes: bf16 products of 1,024 run at {2 * 1024**3 / best / 1e9:.0f} GFLOP/s"
    )


def measure_prefill(parsed: argparse.Namespace, figures: dict[str, Any]) -> None:
    ratios = {}
    for name, (dim, heads, kv_heads, _) in SHAPES.items():
        count, total = 512, 8192
        start = total - count
        q = torch.randn(count, heads, dim)
        k, v = (torch.randn(1, kv_heads, total, dim).bfloat16() for _ in range(2))
        theirs = q.bfloat16().transpose(0, 1)[None].contiguous()
        mask = torch.ones(count, total, dtype=torch.bool).tril(start)
        works: dict[str, Callable[[], object]] = {
            "sdpa": partial(
                scaled_dot_product_attention, theirs, k, v, attn_mask=mask, enable_gqa=True
            )
        }
        for kv_format in ("bf16", "i8", "k8v4"):
            storage = filled(kv_format, (dim, heads, kv_heads, 1), total)
            table = int32(range(1, total // B + 1))
            batch = AttentionBatch(int32([0, count]), int32([start]), table,
                                   int32([0, len(table)]))  # fmt: skip
            works[kv_format] = Case(storage, batch, q, 1).run
        times = in_turn(works, parsed.repeats)
        flops = 4 * dim * heads * (count * start + count * (count + 1) / 2)
        for key, taken in times.items():
            print(f"prefill {name} {key:5} {1e3 * statistics.median(taken):8.2f} ms,"
                  f" {flops / statistics.median(taken) / 1e9:.0f} GFLOP/s")  # fmt: skip
            if key != "sdpa":
                ratios[f"{key}_{name}"] = median_ratio(times["sdpa"], taken)
    figures["prefill_ratios"] = ratios
    figures["prefill_vs_sdpa"] = min(ratios["bf16_d64"], ratios["bf16_d128"])


def measure_writing(figures: dict[str, Any]) -> None:
    """Storing K and V of a decode step of 16 sequences, by the attention over 8,192 tokens."""
    dim, _, kv_heads, _ = SHAPES["d64"]
    for kv_format in ("bf16", "i8", "k8v4"):
        storage = filled(kv_format, (dim, 9, kv_heads, 1), 4096)
        k, v = torch.randn(16, kv_heads, dim), torch.randn(16, kv_heads, dim)
        slots = torch.arange(16, dtype=torch.int32) * 16 + 16
        write = partial(storage.write_kv, 0, k, v, slots)
        taken = min(in_turn({"write": write}, 50)["write"])
        figures[f"{kv_format}_write_us"] = 1e6 * taken
        print(f"writing {kv_format}: {1e6 * taken:.0f} us a layer for 16 tokens")


def measure_million(figures: dict[str, Any]) -> None:
    """A context of 1,000,000 tokens in i4c, as many layers of SmolLM2's shape as fit 2 GiB."""
    case = decode("i4c", (64, 9, 3, 8), 1, 1_000_000 // B * B)
    limits = [read_rate()]
    times = []
    for _ in range(3):
        times.append(timed(case.run))
        limits.append(read_rate())
    taken = statistics.median(times)
    share = figures["million_share"] = case.kv_bytes() / taken / statistics.median(limits)
    print(f"1,000,000 tokens in i4c: {case.kv_bytes() / 2**30:.1f} GiB in 8 layers,"
          f" {1e3 * taken / 8:.1f} ms a layer, {share:.0%} of the read rate")  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto", help=f"one of {_native.available_isas()}")
    parser.add_argument("--only", default="", help="decode, shared, prefill, writing or million")
    parsed = parser.parse_args()
    parsed.batch, parsed.context, parsed.repeats = 16, 8192, 3 if parsed.quick else 9
    use_threads(parsed.threads)
    if not _native.set_isa(parsed.isa):
        parser.error(f"--isa {parsed.isa}: choose one of {_native.available_isas()}")
    torch.manual_seed(0)
    figures: dict[str, Any] = {"isa": _native.isa_name(), "threads": parsed.threads}
    print(f"instruction set {_native.isa_name()}, {parsed.threads} threads")
    if parsed.only in ("", "decode"):
        for name in SHAPES:
            measure_decode(name, parsed, figures)
    if parsed.only in ("", "shared"):
        measure_shared(parsed, figures)
    if parsed.only in ("", "prefill"):
        measure_prefill(parsed, figures)
    if parsed.only in ("", "writing"):
        measure_writing(figures)
    if parsed.only == "million" or (not parsed.only and not parsed.quick):
        measure_million(figures)
    finish(figures, tuple(key for key in KEYS if key in figures), parsed.json)


if __name__ == "__main__":
    main()
