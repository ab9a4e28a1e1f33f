"""Perplexity of SmolLM2 by position on a long text: a check that a forward pass is right.

The text is English documentation that is younger than the model (docs/benchmarks.md, "Data"). In
float32 the four figures are 10.7, 13.7, 29.2 and 16.8; another model, type or KV format gives
others.
"""

import argparse
import lzma
import math
import time
from array import array
from collections.abc import Iterator
from threading import Event

from common import DATA, finish, make_parser, needed
from pagemill.core.config import EngineConfig
from pagemill.core.request import SamplingParams
from pagemill.engine.build import build_engine
from pagemill.engine.engine import Engine, Generate, Piece

BUCKETS = ((0, 511), (512, 2047), (2048, 4095), (4096, 8190))
TEXT = DATA / "text" / "docs2026_mooncake.txt.xz"
SKIP_CHARACTERS = 100_000
CHARACTERS_OF_A_TOKEN = 12


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--num-tokens", type=int, default=8192)
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.num_tokens = min(parsed.num_tokens, 2048)
    return parsed


def scores(engine: Engine, token_ids: list[int]) -> list[float]:
    """Natural-log probability of each token but the first."""
    pieces: list[Piece] = []
    done = Event()

    def take(piece: Piece) -> None:
        pieces.append(piece)
        if piece.finish_reason is not None:
            done.set()

    sampling = SamplingParams(temperature=0, prompt_logprobs=0)
    engine.generate(Generate(array("I", token_ids), sampling, max_tokens=1), take)
    done.wait()
    if pieces[-1].error is not None:
        raise SystemExit(f"the run failed: {pieces[-1].error}")
    return [scored.logprob for piece in pieces for scored in piece.prompt_logprobs]


def buckets(logprobs: list[float]) -> Iterator[tuple[str, float]]:
    """Perplexity by the position of the token that predicts."""
    for first, last in BUCKETS:
        part = logprobs[first : last + 1]
        value = math.exp(-sum(part) / len(part)) if part else math.nan
        yield f"ppl_{first}_{last}", value


def main() -> None:
    parsed = arguments()
    text_file = needed(TEXT, "the documentation of kvcache-ai/Mooncake in one text")
    built = build_engine(
        EngineConfig(
            model=parsed.model,
            dtype=parsed.dtype,
            kv_format=parsed.kv_format,
            num_blocks=parsed.num_tokens // 16 + 8,
            max_model_len=parsed.num_tokens,
        )
    )
    with lzma.open(text_file, "rt", encoding="utf-8") as file:
        text = file.read()[SKIP_CHARACTERS:][: parsed.num_tokens * CHARACTERS_OF_A_TOKEN]
    token_ids = built.model.tokenizer.encode(text)[: parsed.num_tokens - 1]  # one is generated
    built.engine.start()
    started = time.perf_counter()
    logprobs = scores(built.engine, token_ids)
    built.engine.close()
    figures = {"model": parsed.model, "dtype": parsed.dtype, "kv_format": parsed.kv_format}
    figures |= {"num_tokens": len(token_ids), "seconds": time.perf_counter() - started}
    figures |= dict(buckets(logprobs))
    keys = tuple(name for name, _ in buckets(logprobs))
    finish(figures, keys, parsed.json)


if __name__ == "__main__":
    main()
