"""Gemma 3 270M, the real model: windows, two ropes, Q4_K and Q6_K. Only with ``--gemma``.

``scripts/fetch-gemma`` brings the file; ``make soak`` runs both.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.checkpoints import reference_logits
from model.gguf_reference import load_reference
from model.paged_run import assert_same_as, run_paged
from pagemill.models.home import home_folder
from pagemill.models.loader import Model, load_model

pytestmark = pytest.mark.gemma
PROSE = Path(__file__).parents[1] / "data" / "news_from_nowhere.txt"
TEXTS = (
    "Hello, world!",
    "def f(x: int) -> int:\n\treturn x * 2  # twice\n\n\nprint(f(21))\r\n",
    "1234567890 3.14159 0x7fff 1,000,000",
    "Grüße aus Köln: naïve façade, Москва, 東京, 你好世界, مرحبا, हिन्दी",
    "🙂🙃 👩‍👩‍👧‍👦 🇩🇪 e\u0301 𓀀𓀁 \u200b",
    "  leading, trailing  \n\n   \t\t  runs      of     space   ",
    "<start_of_turn>user\nHi<end_of_turn>\n<bos><eos>x",
    "",
    " ",
)


@pytest.fixture(scope="module")
def path() -> Path:
    found = home_folder() / "models" / "gemma-3-270m-q4_k_m.gguf"
    assert found.is_file(), "run scripts/fetch-gemma first (make soak does)"
    return found


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    started = time.perf_counter()
    loaded = load_model(path, torch.float32)
    print(f"Gemma 3 270M loaded in {time.perf_counter() - started:.2f} s")
    return loaded


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return load_reference(path)


@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), [(1100, 512), (97, 13)])
def test_logits_and_greedy_tokens_equal_transformers(
    model: Model, reference: Any, num_tokens: int, chunk_tokens: int
) -> None:
    """The longer prompt is over twice as long as the window of 512."""
    prompt = model.tokenizer.encode(PROSE.read_text(encoding="utf-8"))[:num_tokens]
    run = run_paged(model, prompt, 64, chunk_tokens=chunk_tokens)
    worst = assert_same_as(reference_logits(reference, run.token_ids), run, num_tokens)
    print(f"Gemma 3 270M, {num_tokens} tokens: largest logit difference {worst:.2e}")


def test_tokens_equal_transformers(model: Model, path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = model.tokenizer.encode(text)
        assert ids == tokenizer.encode(text), text
        assert ids[0] == model.tokenizer.token_id("<bos>") and ids.count(ids[0]) in (1, 2)
        assert model.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_what_the_file_says(model: Model) -> None:
    config = model.config
    assert [i for i, window in enumerate(config.windows) if window is None] == [5, 11, 17]
    assert config.ropes[1].base == 10_000.0 and config.ropes[0].base == 1e6
    assert model.template is None
