"""The main job on real input: agent prompts as raw text to a running server.

The first 60 requests of agent_text_miniswe whose prompt has at most 8,184 SmolLM2 tokens go to
/v1/completions with the openai client, in file order, one after another, temperature 0, 8 output
tokens, a pool that holds them all. Then: the same prompts with the cache off (equal outputs, cold
first tokens), and decoding beside transformers.

    python benchmarks/agents.py [--quick] [--json FILE] [--trace FILE]
"""

import json
import lzma
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import BadRequestError, OpenAI
from rich.progress import track

from brute_force import exact_hits, expected_hits
from common import DATA, Server, finish, make_parser, needed

NUM_REQUESTS, QUICK_REQUESTS = 60, 7
MAX_PROMPT_TOKENS = 8184
OUTPUT_TOKENS = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 3000
TOP = 5
MAX_LOGPROB_DIFFERENCE = 2e-3
NEAR_TIE = 1e-4
KEYS = (
    "hit_tokens",
    "expected_hit_tokens",
    "ttft_cached_over_cold",
    "decode_tps",
    "waste",
    "outputs_equal",
    "vs_transformers_b16",
)


@dataclass(frozen=True)
class Answer:
    """One request as a client saw it. Times in seconds."""

    tokens: list[str]
    top: list[dict[str, float]]
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    decode_s: float


def read_prompts(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["input"] for line in lines]


def tokenize(server: Server, texts: Sequence[str]) -> list[list[int]]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        return [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]


def computed_outputs(server: Server, answers: Sequence[Answer]) -> list[list[int]]:
    """Ids of the generated tokens whose KV was computed: all but the last of each answer.

    The API gives tokens as text; one that is not a single token again counts as unknown (-1).
    """
    known: dict[str, int] = {}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for text in sorted({token for answer in answers for token in answer.tokens}):
            body = {"prompt": text, "add_special_tokens": False}
            ids = http.post("/tokenize", json=body).json()["tokens"]
            known[text] = ids[0] if len(ids) == 1 else -1
    return [[known[token] for token in answer.tokens[:-1]] for answer in answers]


def choose(
    server: Server, texts: list[str], count: int
) -> tuple[list[str], list[list[int]], list[str]]:
    """(prompts taken, their token ids, prompts left out on the way)."""
    taken, ids, left_out = [], [], []
    for text in texts:
        (tokens,) = tokenize(server, [text])
        if len(tokens) > MAX_PROMPT_TOKENS:
            left_out.append(text)
            continue
        taken.append(text)
        ids.append(tokens)
        if len(taken) == count:
            break
    return taken, ids, left_out


def ask(client: OpenAI, prompt: str) -> Answer:
    start = time.perf_counter()
    first = last = None
    tokens: list[str] = []
    top: list[dict[str, float]] = []
    usage: Any = None
    stream = client.completions.create(
        model="smollm2-135m",
        prompt=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        logprobs=TOP,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.tokens:
                last = time.perf_counter()
                first = first or last
                tokens += choice.logprobs.tokens
                top += choice.logprobs.top_logprobs or []
    assert first is not None and last is not None
    return Answer(
        tokens,
        top,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        first - start,
        last - first,
    )


def run(server: Server, prompts: Sequence[str], words: str) -> list[Answer]:
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)
    return [ask(client, prompt) for prompt in track(prompts, description=words)]


def refused(server: Server, prompt: str) -> bool:
    """A prompt over the context gets a clean 400 and the server goes on."""
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)
    try:
        client.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=OUTPUT_TOKENS)
    except BadRequestError as error:
        return error.code == "context_length_exceeded"
    return False


def same_answer(one: Answer, other: Answer) -> bool:
    """Equal tokens and five best log-probabilities; a first difference at a near tie is none."""
    for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        best = sorted(one.top[i].values(), reverse=True)
        if a != b:
            return best[0] - best[1] <= NEAR_TIE
        other_best = sorted(other.top[i].values(), reverse=True)
        pairs = zip(best[:TOP], other_best[:TOP], strict=True)
        if any(abs(x - y) > MAX_LOGPROB_DIFFERENCE for x, y in pairs):
            return False
    return len(one.tokens) == len(other.tokens)


def spread(count: int, size: int) -> list[int]:
    """``size`` indexes over ``count`` requests; the first is left out, nothing was cached then."""
    step = (count - 1) / size
    return [1 + int(i * step) for i in range(size)]


def with_cache(args: Any) -> tuple[dict[str, Any], list[str], list[Answer]]:
    flags = ("--dtype", "float32", "--num-blocks", str(NUM_BLOCKS), "--prefix-index", "flat")
    with Server(args.model, *flags) as server:
        count = QUICK_REQUESTS if args.quick else NUM_REQUESTS
        prompts, ids, left_out = choose(server, read_prompts(args.trace), count)
        answers = run(server, prompts, "with the cache")
        too_long = left_out[0] if left_out else " ".join(prompts)
        clean_400 = refused(server, too_long)
        outputs = computed_outputs(server, answers)
    expected, exact = expected_hits(ids, BLOCK_SIZE, outputs), exact_hits(ids, outputs)
    hits = [answer.cached_tokens for answer in answers]
    total = sum(map(len, ids))
    figures = {
        "num_requests": len(prompts),
        "prompt_tokens": total,
        "left_out": len(left_out),
        "left_out_gets_clean_400": clean_400,
        "hit_tokens": sum(hits),
        "expected_hit_tokens": sum(expected),
        "expected_of_prompts_alone": sum(expected_hits(ids, BLOCK_SIZE)),
        "requests_with_other_hits": sum(a != b for a, b in zip(hits, expected, strict=True)),
        "exact_hit_tokens": sum(exact),
        "waste": (sum(exact) - sum(hits)) / total,
        "decode_tps": statistics.median((OUTPUT_TOKENS - 1) / a.decode_s for a in answers),
    }
    return figures, prompts, answers


def without_cache(args: Any, prompts: list[str], cached: list[Answer]) -> dict[str, Any]:
    chosen = spread(len(prompts), 6 if args.quick else 12)
    flags = ("--dtype", "float32", "--num-blocks", "600", "--prefix-index", "off")
    with Server(args.model, *flags) as server:
        cold = run(server, [prompts[i] for i in chosen], "with the cache off")
    hot = [cached[i] for i in chosen]
    assert all(answer.cached_tokens == 0 for answer in cold)
    assert all(answer.cached_tokens > 0 for answer in hot), "the path was not used"
    ttft_cold = statistics.median(a.ttft for a in cold)
    ttft_hot = statistics.median(a.ttft for a in hot)
    return {
        "num_compared": len(chosen),
        "outputs_equal": all(same_answer(a, b) for a, b in zip(hot, cold, strict=True)),
        "ttft_cold_s": ttft_cold,
        "ttft_cached_s": ttft_hot,
        "ttft_cached_over_cold": ttft_hot / ttft_cold,
    }


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--trace", type=Path, default=DATA / "traces" / "agent_text_miniswe.jsonl.xz"
    )
    args = parser.parse_args()
    needed(args.trace, "miniswe of the data set LMCache/lmcache-agent-trace; or give --trace FILE")
    figures, prompts, cached = with_cache(args)
    figures |= without_cache(args, prompts, cached)
    from transformers_b16 import compare

    figures |= compare(args.model, quick=args.quick)
    figures["answers"] = [asdict(answer) | {"top": None} for answer in cached]
    for name, value in figures.items():
        if name != "answers":
            print(f"{name:26} {value}")
    finish(figures, KEYS, args.json)


if __name__ == "__main__":
    main()
