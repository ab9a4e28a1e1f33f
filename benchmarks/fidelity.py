"""How far packed and bfloat16 weights are from float32: mean KL of next-token distributions.

The same file in float32 is the reference. Each other way computes the same text in windows, in
chunks as small as decoding (16 tokens) and as large as a prompt's. KV stays float32, so that the
weights and products alone count; ``--kv-format`` takes another one for all but the reference.
"""

import argparse
import lzma

import torch

from common import DATA, finish, make_parser, needed
from pagemill.models.decoder import Decoder
from pagemill.models.home import find_model
from pagemill.models.loader import load_model
from pagemill.runtime.cache_run import CacheRun, KvChoice

TEXT = DATA / "text" / "docs2026_mooncake.txt.xz"
SKIP_CHARACTERS = 100_000
CHARACTERS_OF_A_TOKEN = 12
WINDOW_TOKENS = 512
CHUNKS = (16, 64, 512)
LOGITS_AT_ONCE = 64


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-format", default="fp32")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.num_tokens = min(parsed.num_tokens, 1024)
    return parsed


def hidden_states(
    decoder: Decoder, kv_format: str, windows: list[list[int]], chunk: int
) -> torch.Tensor:
    """Final hidden states of all windows, float32 [T, N]."""
    states = []
    for window in windows:
        run = CacheRun(decoder, KvChoice(kv_format), 2 * len(window) + chunk, 2)
        for first in range(0, len(window), chunk):
            states += run.ask([window[first : first + chunk]])
            run.adopt(0)
    return torch.cat(states)


@torch.inference_mode()
def mean_kl(
    reference: Decoder, decoder: Decoder, expected: torch.Tensor, found: torch.Tensor
) -> float:
    """Both through their own heads; few rows at a time, as decoding has them."""
    total = 0.0
    for p, q in zip(expected.split(LOGITS_AT_ONCE), found.split(LOGITS_AT_ONCE), strict=True):
        log_p = reference.logits(p).double().log_softmax(-1)
        log_q = decoder.logits(q).double().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(expected)


def main() -> None:
    parsed = arguments()
    text_file = needed(TEXT, "the documentation of kvcache-ai/Mooncake in one text")
    path = find_model(parsed.model)
    reference = load_model(path, torch.float32)
    with lzma.open(text_file, "rt", encoding="utf-8") as file:
        text = file.read()[SKIP_CHARACTERS:][: parsed.num_tokens * CHARACTERS_OF_A_TOKEN]
    token_ids = reference.tokenizer.encode(text)[: parsed.num_tokens]
    starts = range(0, len(token_ids), WINDOW_TOKENS)
    windows = [token_ids[first : first + WINDOW_TOKENS] for first in starts]
    exact = Decoder(reference.config, reference.weights, 2 * WINDOW_TOKENS)
    expected = hidden_states(exact, "fp32", windows, WINDOW_TOKENS)
    figures: dict[str, object] = {"model": parsed.model, "num_tokens": len(token_ids)}
    keys = ["num_tokens"]
    for name, stays_packed in (("packed", True), ("bf16", False)):
        model = load_model(path, torch.bfloat16, stays_packed=stays_packed)
        decoder = Decoder(model.config, model.weights, 2 * WINDOW_TOKENS)
        figures[f"{name}_bytes"] = model.weights.num_bytes()
        for chunk in CHUNKS:
            found = hidden_states(decoder, parsed.kv_format, windows, chunk)
            key = f"kl_{name}_{chunk}"
            keys.append(key)
            figures[key] = mean_kl(exact, decoder, expected, found)
            print(f"{name}, chunks of {chunk}: mean KL {figures[key]:.2e}", flush=True)
    finish(figures, tuple(keys), parsed.json)


if __name__ == "__main__":
    main()
