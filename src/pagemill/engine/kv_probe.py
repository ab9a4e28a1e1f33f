"""Does the KV format suit the keys of this model? Found out before the cache is built.

A built-in text runs through the model once, over float32 KV. What a format makes of these keys is
compared with the keys (``runtime/probe.py``). A format that damages them is left for the next one
in the row i4c -> k8v4 -> i8 -> bf16, and that is said; ``--kv-format-force on`` keeps it anyway.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.core.units import ceil_div
from pagemill.kernels.batch import AttentionBatch
from pagemill.kernels.kv_storage import KVStorage
from pagemill.models.decoder import Decoder, TokenBatch
from pagemill.models.loader import Model
from pagemill.runtime.probe import FALL_BACK, MIN_TOKENS, ProbeReport, make_report, probe_layer

NUM_TOKENS = 256
BLOCK_SIZE = 16

TEXT = """The harbour master kept three books: ships that came, ships that left, and ships that
were only talked about. On 14 March the second book had 27 lines, the third 112. "A lost page costs
us time," she told the apprentice, "never an answer." He wrote that down under 0x7f3a, next to a
drawing of a crane, and asked what a knot was. Then the bell rang twice and both went out into the
rain.

def tide(hour: int) -> float:
    return 2.4 * math.sin(2 * math.pi * (hour - 3) / 12.42) + 0.3

| pier | depth (m) | free from |
|---|---|---|
| North 1 | 7.5 | 06:40 |
| North 2 | 9.0 | 11:15 |
| Old quay | 3.2 | - |

Der Wind dreht auf Nordwest. Le bateau de 18 h 30 est en retard. El faro no funciona desde ayer.
Prices rose by 3.75 % in the first quarter, fell by 1.2 % in the second, and then nobody counted any
more; the list {"rope": 12, "tar": 7, "lamp oil": 31} was enough for the winter.
"""


def suit_formats(
    model: Model,
    decoder: Decoder,
    formats: Sequence[str],
    centers: Tensor | None,
    *,
    is_forced: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The formats that are used in the end, one a layer, and what a person must hear about it.

    Layers whose format is not coded are not looked at, and no model of fewer than 64 positions. The
    text is cut to what the model holds.
    """
    lines: list[str] = []
    if not any(name in FALL_BACK for name in formats) or decoder.num_positions < MIN_TOKENS:
        return tuple(formats), ()
    keys = _keys(model, decoder, centers)
    while True:
        report = _report(formats, keys)
        lines += [f"warning: {line}" for line in report.lines() if f"warning: {line}" not in lines]
        below = report.fall_back
        if below is None:
            return tuple(formats), tuple(lines)
        if is_forced:
            lines.append(f"KV format {report.kv_format} is kept: --kv-format-force is on")
            return tuple(formats), tuple(lines)
        lines.append(
            f"KV format {report.kv_format} does not suit this model: {below} is used instead"
            " (--kv-format-force on keeps it)"
        )
        formats = [below if name == report.kv_format else name for name in formats]


@torch.inference_mode()
def _keys(model: Model, decoder: Decoder, centers: Tensor | None) -> list[Tensor]:
    """Keys of the built-in text in every layer, minus their centers: float32 [T, K, D] each."""
    config = model.config
    token_ids = model.tokenizer.encode(TEXT)[: min(NUM_TOKENS, decoder.num_positions)]
    num_tokens = len(token_ids)
    num_blocks = ceil_div(num_tokens, BLOCK_SIZE)
    cache = CacheConfig(
        config.layer_groups, (num_blocks + 1,) * len(config.layer_groups), BLOCK_SIZE
    )
    storage = decoder.kernels.make_storage(
        cache, "fp32", config.num_kv_heads, config.head_dim, centers=centers
    )
    batch = _one_sequence(num_tokens, num_blocks)
    slots = torch.arange(num_tokens, dtype=torch.int32) + BLOCK_SIZE
    decoder.forward(
        TokenBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(num_tokens, dtype=torch.int32),
            slots=(slots,) * len(cache.groups),
            attention=(batch,) * len(cache.groups),
        ),
        storage,
    )
    return [
        storage.layouts[layer]
        .decode_tiles(storage.tiles(layer)[1:].cpu())[0]
        .flatten(0, 1)[:num_tokens]
        for layer in range(config.num_layers)
    ]


def _one_sequence(num_tokens: int, num_blocks: int) -> AttentionBatch:
    return AttentionBatch(
        query_start=np.array([0, num_tokens], np.int32),
        context_start=np.array([0], np.int32),
        block_ids=np.arange(1, num_blocks + 1, dtype=np.int32),
        indptr=np.array([0, num_blocks], np.int32),
        tail_slots=np.array([0], np.int32),
    )


def _report(formats: Sequence[str], keys: Sequence[Tensor]) -> ProbeReport:
    """What the coded layers' format makes of their keys. (There is one coded format at most.)"""
    kv_format = next((name for name in formats if name in FALL_BACK), formats[0])
    layers = [
        probe_layer(layer, keys[layer][: len(decoded)], decoded)
        for layer, name in enumerate(formats)
        if name == kv_format
        for decoded in (_decoded(kv_format, keys[layer]),)
    ]
    return make_report(kv_format, layers)


def _decoded(kv_format: str, keys: Tensor) -> Tensor:
    """The keys as a reader of the cache gets them: [T, K, D], whole groups of 16 tokens."""
    num_tokens = len(keys) // BLOCK_SIZE * BLOCK_SIZE or len(keys)
    num_blocks = ceil_div(num_tokens, BLOCK_SIZE)
    cache = CacheConfig((LayerGroup("probed", (0,)),), (num_blocks + 1,), BLOCK_SIZE)
    storage = KVStorage(cache, kv_format, keys.shape[1], keys.shape[2], num_tails=1)
    used = keys[:num_tokens]
    if storage.has_tails:
        storage.write_step(0, used, used, _one_sequence(num_tokens, num_blocks))
    else:
        storage.write_kv(0, used, used, torch.arange(num_tokens) + BLOCK_SIZE)
    return storage.layouts[0].decode_tiles(storage.tiles(0)[1:])[0].flatten(0, 1)[:num_tokens]
