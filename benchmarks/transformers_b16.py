"""Decoding of 16 sequences beside ``transformers`` in bfloat16, the same weights, one run.

16 prompts of 512 random tokens, 32 new tokens; the time to the first token (prefill) is subtracted.
``--quick`` takes prompts of 32 tokens, because the peer's prefill alone can take minutes, and half
the new tokens.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from common import Server, finish, make_parser

BATCH = 16
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 512, 32
NEW_TOKENS, QUICK_NEW_TOKENS = 32, 16
ROUNDS = 2


def prompts(rng: random.Random, length: int) -> list[list[int]]:
    return [[rng.randrange(100, 48_000) for _ in range(length)] for _ in range(BATCH)]


class Ours:
    """The server, all prompts in one request; one token first, then the rest."""

    def __init__(self, model: str, *flags: str) -> None:
        self._server = Server(model, "--num-blocks", "4000", *flags)
        self._http = httpx.Client(base_url=self._server.url, timeout=600)
        self.choices = self._server.lines[:-1]
        self.call(prompts(random.Random(0), 32), 4)  # warm up

    def call(self, ids: list[list[int]], max_tokens: int) -> float:
        """Seconds of one request with all prompts."""
        body = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body).json()
        seconds = time.perf_counter() - start
        assert answer["usage"]["completion_tokens"] == BATCH * max_tokens
        return seconds

    def measure(self, rng: random.Random, length: int, new: int) -> tuple[float, float]:
        """(decode tokens/s, seconds of the whole call)."""
        first = self.call(prompts(rng, length), 1)
        whole = self.call(prompts(rng, length), 1 + new)
        return BATCH * new / (whole - first), whole

    def close(self) -> None:
        self._server.__exit__()


class Theirs:
    """``generate`` of transformers; a streamer notes when each step ended."""

    def __init__(self, path: Path) -> None:
        import torch

        self._torch = torch
        self._model = reference_model(path)

    def measure(self, rng: random.Random, length: int, new: int) -> tuple[float, float]:
        torch = self._torch
        ids = torch.tensor(prompts(rng, length))
        ended: list[float] = []

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            ended.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=1 + new,
                min_new_tokens=1 + new,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        whole = time.perf_counter() - start
        return BATCH * new / (ended[-1] - ended[0]), whole


def reference_model(path: Path) -> Any:
    """A ``transformers`` Llama in bfloat16 with the weights of a llama-type GGUF file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pagemill.models.loader import load_model

    loaded = load_model(path, torch.bfloat16)
    c = loaded.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].base},
        tie_word_embeddings=True,
    )
    state = {
        "model.embed_tokens.weight": loaded.weights.embedding,
        "model.norm.weight": loaded.weights.final_norm,
        "lm_head.weight": loaded.weights.output,
    }
    rows = [c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2]
    for i, layer in enumerate(loaded.weights.layers):
        q, k, v = layer.qkv.split(rows)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_output,
            "post_attention_layernorm": layer.ffn_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(state)
    return model.eval()


def compare(model: str, *, quick: bool) -> dict[str, Any]:
    from pagemill.models.home import find_model

    length = QUICK_PROMPT_TOKENS if quick else PROMPT_TOKENS
    new = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    rng = random.Random(1)
    ours, theirs = Ours(model), Theirs(find_model(model))
    pairs = [
        (ours.measure(rng, length, new), theirs.measure(rng, length, new))
        for _ in range(1 if quick else ROUNDS)
    ]
    ours.close()
    our_tps = statistics.median(mine[0] for mine, _ in pairs)
    their_tps = statistics.median(other[0] for _, other in pairs)
    return {
        "b16_prompt_tokens": length,
        "b16_choices": ours.choices,
        "b16_our_tps": our_tps,
        "b16_transformers_tps": their_tps,
        "vs_transformers_b16": our_tps / their_tps,
        "vs_transformers_b16_whole_call": statistics.median(
            other[1] / mine[1] for mine, other in pairs
        ),
    }


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    figures = compare("smollm2-135m", quick=args.quick)
    for name, value in figures.items():
        print(f"{name:32} {value}")
    finish(figures, ("vs_transformers_b16", "vs_transformers_b16_whole_call"), args.json)


if __name__ == "__main__":
    main()
