"""The counted bytes and operations against counting every query and key."""

from array import array
from dataclasses import replace

import pytest

from pagemill.core.request import SamplingParams
from pagemill.core.step import SequencePlan, StepPlan
from pagemill.core.types import SequenceId, StepId, TableId
from pagemill.models.config import ModelConfig, RopeConfig
from pagemill.runtime.cost import CostModel

CONFIG = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    max_positions=100,
    ropes=(RopeConfig(), RopeConfig()),
    windows=(None, 5, 5),
    attention_scale=0.25,
)


def plan(*parts: tuple[int, int, bool]) -> StepPlan:
    sequences = tuple(
        SequencePlan(
            sequence_id=SequenceId(i),
            table_id=TableId(i),
            start=start,
            count=count,
            token_ids=array("I", range(count)),
            num_prompt_tokens=1,
            sampling=SamplingParams() if samples else None,
        )
        for i, (start, count, samples) in enumerate(parts)
    )
    return StepPlan(StepId(0), sequences, ())


def keys_of(position: int, window: int | None) -> set[int]:
    first = 0 if window is None else max(0, position - window + 1)
    return set(range(first, position + 1))


@pytest.mark.parametrize("parts", [((0, 1, True),), ((7, 4, False), (30, 1, True), (0, 12, True))])
def test_counts_equal_counting_one_by_one(parts: tuple[tuple[int, int, bool], ...]) -> None:
    model = CostModel(CONFIG, weight_bytes=10, matrix_parameters=7,
                      kv_token_bytes=(256,) * 3)  # fmt: skip
    read = pairs = 0
    for start, count, _ in parts:
        for window in CONFIG.windows:
            seen = [keys_of(p, window) for p in range(start, start + count)]
            read += len(set().union(*seen))
            pairs += sum(map(len, seen))
    tokens, logits = sum(p[1] for p in parts), sum(p[2] for p in parts)
    cost = model.of(plan(*parts))
    assert cost.weight_bytes == 10
    assert cost.kv_bytes == read * 256
    assert cost.flops == 2 * (7 * tokens + 100 * 8 * logits + 2 * 4 * 16 * pairs)


def test_without_windows_every_key_counts() -> None:
    full = replace(CONFIG, windows=(None, None, None))
    model = CostModel(full, 0, 0, (1, 1, 1))
    assert model.of(plan((9, 1, True))).kv_bytes == 30
