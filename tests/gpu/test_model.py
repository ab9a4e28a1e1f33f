"""Whole models through the GPU's code path: scheduler, cache, runner, decoder, Triton kernels."""

from pathlib import Path

import pytest
import torch

from model.checkpoints import random_model, random_prompt, save_folder
from model.gpu_case import KERNELS, error
from model.paged_run import assert_same_as, run_paged
from pagemill.models.loader import Model, load_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROMPT_TOKENS = 45


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def tiny(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> Model:
    if not (folder / case).is_dir():
        save_folder(random_model(case), folder / case)
    return load_model(folder / case, dtype)


@pytest.mark.parametrize("case", ["llama-rope3-bias", "qwen3", "gemma3"])
def test_logits_and_tokens_are_the_cpus(folder: Path, case: str) -> None:
    """Biases, norms of heads, windows: float32 throughout, in chunks and then token by token."""
    model = tiny(folder, case)
    prompt = random_prompt(PROMPT_TOKENS)
    here = run_paged(model, prompt, 4, chunk_tokens=20)
    there = run_paged(model, prompt, 4, chunk_tokens=20, kernels=KERNELS)
    assert there.num_steps == here.num_steps == 6
    assert_same_as(here.logits, there_on_cpu(there, here), PROMPT_TOKENS)


def there_on_cpu(run, like):  # type: ignore[no-untyped-def]
    """The run with its logits in host memory."""
    assert run.token_ids == like.token_ids
    return type(run)(run.token_ids, run.logits.cpu(), run.num_steps)


@pytest.mark.parametrize("kv_format", ["bf16", "i8", "f8", "k8v4", "i4c"])
def test_coded_kv_gives_nearly_the_cpus_logits(folder: Path, kv_format: str) -> None:
    """The same bytes are read; the CPU takes 8 bits of the queries where it multiplies bytes."""
    model = tiny(folder, "qwen2")
    prompt = random_prompt(PROMPT_TOKENS)
    here = run_paged(model, prompt, 2, chunk_tokens=20, kv_format=kv_format)
    there = run_paged(model, prompt, 2, chunk_tokens=40, kv_format=kv_format, kernels=KERNELS)
    most = 1e-2 if kv_format in ("bf16", "f8") else 5e-2
    assert error(there.logits[: PROMPT_TOKENS - 1], here.logits[: PROMPT_TOKENS - 1]) < most
