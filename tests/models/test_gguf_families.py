"""GGUF files of every family and type against ``transformers`` with the decoded weights.

A Gemma file does not hold ``query_pre_attn_scalar``: it is the head dim but for the 27B model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.checkpoints import random_model, random_prompt, reference_logits
from model.gguf_files import write_gguf
from model.paged_run import assert_same_as, run_paged
from pagemill.models.loader import load_model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SIX_LAYERS = {"num_hidden_layers": 6, "head_dim": 64, "query_pre_attn_scalar": 64}
CASES: list[tuple[str, Kind, dict[str, Any]]] = [
    ("llama", Kind.Q8_0, {}),
    ("llama-rope3-bias", Kind.Q4_1, {}),
    ("llama-linear", Kind.F16, {}),
    ("smollm", Kind.Q4_1, {"hidden_size": 96}),
    ("mistral", Kind.Q4_0, {"head_dim": 32}),
    ("qwen2", Kind.Q5_0, {}),
    ("qwen2", Kind.Q4_K, WIDE),
    ("qwen3", Kind.BF16, {}),
    ("qwen3", Kind.F32, {}),
    ("gemma3", Kind.Q5_0, {"query_pre_attn_scalar": 32}),
    ("gemma3", Kind.Q6_K, {**WIDE, **SIX_LAYERS}),
]


@pytest.mark.parametrize(("case", "kind", "changes"), CASES, ids=lambda value: str(value)[:20])
def test_logits_and_greedy_tokens_equal_transformers(
    tmp_path: Path, case: str, kind: Kind, changes: dict[str, Any]
) -> None:
    reference = random_model(case, **changes)
    output_kind = Kind.Q8_0 if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K) else kind
    path = write_gguf(
        reference,
        tmp_path / "model.gguf",
        lambda name: output_kind if name.startswith(("token_embd", "output")) else kind,
    )
    model = load_model(path, torch.float32)
    run = run_paged(model, random_prompt(70), 64, chunk_tokens=29)
    expected = reference_logits(reference, run.token_ids)
    assert expected.std(dim=1).mean() > 0.5, "the reference's logits are nearly alike"
    worst = assert_same_as(expected, run, 70)
    print(f"{case} {kind.name}: largest logit difference {worst:.2e}")


PACKED_CASES = [case for case in CASES if case[1] not in (Kind.F16, Kind.BF16, Kind.F32)]


@pytest.mark.parametrize(("case", "kind", "changes"), PACKED_CASES, ids=lambda v: str(v)[:20])
def test_packed_weights_answer_like_float32(
    tmp_path: Path, case: str, kind: Kind, changes: dict[str, Any]
) -> None:
    """Pairs of rows are put into halves before they are packed, and parts of types stay parts."""
    reference = random_model(case, **changes)
    mixed = Kind.Q6_K if changes.get("hidden_size") == 256 else Kind.Q8_0
    path = write_gguf(
        reference, tmp_path / "model.gguf", lambda name: mixed if "attn_v" in name else kind
    )
    model = load_model(path, torch.bfloat16, stays_packed=True)
    assert model.weights.num_packed_bytes() == model.weights.num_bytes()
    assert model.weights.num_matrix_parameters() == sum(
        p.numel() for name, p in reference.named_parameters() if ".layers." in name and p.ndim == 2
    )
    run = run_paged(model, random_prompt(40), 4, chunk_tokens=17)
    expected = reference_logits(reference, run.token_ids).log_softmax(-1)
    kl = (expected.exp() * (expected - run.logits.log_softmax(-1))).sum(-1)
    assert 0 <= kl.mean() < 1e-4
