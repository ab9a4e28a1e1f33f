"""SmolLM2-135M, the real model, against ``transformers``: logits, text, perplexity, chats."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.checkpoints import reference_logits
from model.gguf_reference import load_reference
from model.paged_run import PagedRun, assert_same_as, run_paged
from pagemill.kernels.packed import PackedMatrix
from pagemill.models.loader import Model, load_model

PROSE = Path(__file__).parents[1] / "data" / "news_from_nowhere.txt"
GOLDEN_PERPLEXITY = 29.9336
"""Of tokens 1 to 511 of PROSE under ``transformers`` in float32."""
TEXTS = (
    "Hello, world!",
    "def f(x: int) -> int:\n\treturn x * 2  # twice\n\n\nprint(f(21))\r\n",
    "1234567890 3.14159 0x7fff 1,000,000 12:34:56 2026-11-30",
    "Grüße aus Köln: naïve façade, Ångström, Москва, 東京, 你好世界, مرحبا, हिन्दी",
    "🙂🙃 👩‍👩‍👧‍👦 🇩🇪 e\u0301 n\u0303 \u200b\u00a0zero and no-break",
    "  leading, trailing  \n\n   \t\t  runs      of     space   ",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start|>x<|im_end|>y",
    "I'm you're he'll WE'VE don't 'tis ''quoted''",
    "",
    " ",
    "\n",
    "a",
    "\x00\x01\x7f control \ufffd \ufeff bom",
)
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    started = time.perf_counter()
    loaded = load_model(smollm2, torch.float32)
    print(f"SmolLM2 loaded in {time.perf_counter() - started:.2f} s")
    return loaded


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return load_reference(smollm2)


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def prose_run(model: Model) -> PagedRun:
    prompt = model.tokenizer.encode(PROSE.read_text(encoding="utf-8"))[:512]
    return run_paged(model, prompt, 1, chunk_tokens=200)


def test_logits_and_greedy_tokens_equal_transformers(model: Model, reference: Any) -> None:
    assert model.template is not None
    chat = model.template.render([{"role": "user", "content": "Tell me how a cache works."}])
    prompt = model.tokenizer.encode(chat)
    run = run_paged(model, prompt, 64, chunk_tokens=19)
    worst = assert_same_as(reference_logits(reference, run.token_ids), run, len(prompt))
    print(f"SmolLM2: largest logit difference {worst:.2e}")


def test_logits_of_long_prose_equal_transformers(prose_run: PagedRun, reference: Any) -> None:
    start = prose_run.token_ids[:400]
    difference = (reference_logits(reference, start) - prose_run.logits[:399]).abs().max()
    print(f"SmolLM2, prose: largest logit difference {float(difference):.2e}")
    assert difference < 1e-3


def nll(run: PagedRun) -> torch.Tensor:
    """Negative log-likelihood of each prompt token but the first."""
    log_probabilities = torch.log_softmax(run.logits, dim=-1)[: len(run.token_ids) - 2]
    targets = torch.tensor(run.token_ids[1:-1])
    return -log_probabilities.gather(1, targets[:, None])[:, 0]


def test_perplexity_of_prose_is_the_golden_one(prose_run: PagedRun) -> None:
    perplexity = math.exp(float(nll(prose_run).double().mean()))
    print(f"perplexity {perplexity:.5f}")
    assert perplexity == pytest.approx(GOLDEN_PERPLEXITY, rel=1e-4)


def test_bfloat16_weights_and_kv_stay_close(smollm2: Path, prose_run: PagedRun) -> None:
    narrow = load_model(smollm2, torch.bfloat16)
    for num_tokens, chunk_tokens in ((256, 256), (96, 16)):  # products of many rows, and of few
        prompt = prose_run.token_ids[:num_tokens]
        run = run_paged(narrow, prompt, 1, chunk_tokens=chunk_tokens, kv_format="bf16")
        expected = torch.log_softmax(prose_run.logits[:num_tokens], dim=-1)
        found = torch.log_softmax(run.logits, dim=-1)
        kl = (expected.exp() * (expected - found)).sum(dim=-1)
        print(f"bfloat16, chunks of {chunk_tokens}: mean KL {kl.mean():.2e}, most {kl.max():.2e}")
        assert 0 < kl.mean() < 0.01


def test_packed_weights_stay_closer_than_bfloat16_ones(smollm2: Path, prose_run: PagedRun) -> None:
    packed = load_model(smollm2, torch.bfloat16, stays_packed=True)
    weights = packed.weights
    assert weights.num_packed_bytes() == weights.num_bytes() < 97 * 2**20
    assert isinstance(weights.embedding, PackedMatrix)
    assert isinstance(weights.output, PackedMatrix)
    assert weights.output.parts[0].packed is weights.embedding.parts[0].packed, "tied: no copy"
    prompt = prose_run.token_ids[:96]
    expected = torch.log_softmax(prose_run.logits[:96], dim=-1)
    runs = [run_paged(packed, prompt, 1, chunk_tokens=chunk) for chunk in (16, 64)]
    kl = (expected.exp() * (expected - torch.log_softmax(runs[0].logits, dim=-1))).sum(dim=-1)
    print(f"packed: mean KL {kl.mean():.2e}, most {kl.max():.2e}")
    assert 0 < kl.mean() < 5e-5
    assert torch.equal(runs[0].logits, runs[1].logits), "a token's company changed its logits"
    many = run_paged(packed, prose_run.token_ids[:256], 1, chunk_tokens=256)
    expected = torch.log_softmax(prose_run.logits[:256], dim=-1)
    kl = (expected.exp() * (expected - torch.log_softmax(many.logits, dim=-1))).sum(dim=-1)
    assert 0 < kl.mean() < 2e-3


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_transformers(model: Model, reference_tokenizer: Any, text: str) -> None:
    ids = model.tokenizer.encode(text)
    assert ids == reference_tokenizer.encode(text)
    for skip in (True, False):
        assert model.tokenizer.decode(ids, skip_special_tokens=skip) == reference_tokenizer.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


CHATS: tuple[Callable[[], list[dict[str, str]]], ...] = (
    lambda: QUESTION,
    lambda: [{"role": "system", "content": "Be brief."}, *QUESTION],
    lambda: [*QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "✓?"}],
)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_chats_render_as_in_transformers(
    model: Model,
    reference_tokenizer: Any,
    chat: Callable[[], list[dict[str, str]]],
    add_generation_prompt: bool,
) -> None:
    assert model.template is not None
    found = model.template.render(chat(), add_generation_prompt=add_generation_prompt)
    assert found == reference_tokenizer.apply_chat_template(
        chat(), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ids = model.tokenizer.encode(found, add_special_tokens=False)
    assert ids == reference_tokenizer.encode(found, add_special_tokens=False)


def test_what_the_file_says(model: Model) -> None:
    assert model.tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert model.eos_token_ids == (model.tokenizer.token_id("<|im_end|>"),)
    assert model.config.max_positions == 8192 and model.config.tied_output
