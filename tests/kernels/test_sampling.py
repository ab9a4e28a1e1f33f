"""Sampling: exact where it must be, the right distribution where it is random."""

import math
from array import array

import pytest
import torch

from pagemill.core.request import SamplingParams
from pagemill.core.types import SequenceId
from pagemill.kernels.sampling import Sampler, SampleRow, token_logprobs

V = 40


def row(position: int = 0, sequence: int = 0, **params: object) -> SampleRow:
    history = params.pop("history", None)
    num_prompt = params.pop("num_prompt_tokens", 0)
    return SampleRow(SequenceId(sequence), SamplingParams(**params), position, num_prompt, history)


def pick(logits: torch.Tensor, *rows: SampleRow) -> list[int | None]:
    return [s.token_id for s in Sampler(logits.shape[1], secret=1).sample(logits, rows)]


def frequencies(logits: torch.Tensor, count: int = 4000, **params: object) -> torch.Tensor:
    rows = [row(position, seed=7, **params) for position in range(count)]
    tokens = pick(logits.expand(count, -1), *rows)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, V)
    logits[1, 9] = logits[1, 30] = 2.0
    logits[2, V - 1] = 1e-6
    assert pick(logits, *[row(temperature=0.0)] * 3) == [0, 9, V - 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-46, 1e-45, 1e-38, 1e-20, 9e-6])
@pytest.mark.parametrize(
    "filters", [{}, {"min_p": 0.1}, {"min_p": 5e-324}, {"top_k": 3}, {"top_p": 0.5}]
)
def test_a_tiny_temperature_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.zeros(2, V)
    logits[0, 9] = logits[0, 30] = 2.0
    logits[1, V - 1] = 300.0
    rows = [row(i, seed=i, temperature=temperature, **filters) for i in range(2)]
    assert pick(logits, *rows) == [9, V - 1]


@pytest.mark.parametrize("params", [{"min_p": 5e-324}, {"top_p": 5e-324}, {"min_p": 1.0}])
def test_tiny_filters_keep_their_meaning(params: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 3.0, 0.0, 3.0]])
    picked = {pick(logits, row(i, seed=i, temperature=1e-5, **params))[0] for i in range(40)}
    assert picked == ({1} if "top_p" in params else {1, 3})


def test_no_rows() -> None:
    assert Sampler(V).sample(torch.empty(0, V), []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 2
    want = (logits / temperature).softmax(0)
    assert (frequencies(logits, temperature=temperature) - want).abs().max() < 0.03


def reference_filter(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after min_p, top_k, top_p, the textbook way."""
    probs = logits.double().softmax(0)
    probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    order = probs.argsort(descending=True)
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before >= params.top_p]] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 8, "top_p": 0.6},
        {"min_p": 0.05, "top_p": 0.7},
        {"min_p": 0.3, "top_k": 9, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vocab", [V, 3000])
def test_filters(params: dict[str, float], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    got = frequencies(logits, 1500 if vocab == V else 200, **params)
    want = reference_filter(logits, SamplingParams(**params))
    assert not got[want == 0].any()
    assert (got - want).abs().max() < (0.05 if vocab == V else 0.15)


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = torch.randn(6, V)
    rows = [row(i, i, seed=5 + i, top_p=0.9 if i % 2 else 1.0) for i in range(6)]
    whole = pick(logits, *rows)
    assert whole == [pick(logits[i : i + 1], rows[i])[0] for i in range(6)]
    flat = torch.zeros(40, V)
    tokens = pick(flat, *[row(i, i, seed=1) for i in range(40)])
    assert tokens == pick(flat, *[row(i, 99, seed=1) for i in range(40)])
    assert tokens != pick(flat, *[row(i, i, seed=2) for i in range(40)])
    assert tokens != pick(flat, *[row(i + 1, i, seed=1) for i in range(40)])


def test_without_a_seed_every_sequence_has_its_own_stream() -> None:
    flat = torch.zeros(30, V)
    a = pick(flat, *[row(i, 1) for i in range(30)])
    assert a != pick(flat, *[row(i, 2) for i in range(30)])
    rows = [row(i, 1) for i in range(30)]
    assert Sampler(V).sample(flat, rows) != Sampler(V).sample(flat, rows)


def test_penalties() -> None:
    logits = torch.full((1, V), -1.0)
    logits[0, :5] = torch.tensor([2.0, 1.9, 1.5, 1.0, 0.5])
    history = array("I", [0, 7, 0, 1, 1, 2])  # the prompt is 0, 7, 0

    def choose(**params: float) -> int | None:
        return pick(logits, row(temperature=0.0, history=history, num_prompt_tokens=3, **params))[0]

    assert choose() == 0
    assert choose(presence_penalty=1.0) == 0  # the prompt does not count
    assert choose(repetition_penalty=3.0) == 3  # 2/3, 1.9/3, 1.5/3 against 1.0
    assert choose(repetition_penalty=0.5) == 0
    only = logits.clone()
    only[0, 0] = -9.0
    args = {"temperature": 0.0, "history": history, "num_prompt_tokens": 3}
    assert pick(only, row(presence_penalty=0.3, **args)) == [1]
    assert pick(only, row(frequency_penalty=0.45, **args)) == [2]  # 1.9 - 0.9, 1.5 - 0.45
    assert logits[0, 0] == 2.0  # the caller's logits are untouched


def test_logit_bias() -> None:
    logits = torch.zeros(1, V)
    assert pick(logits, row(temperature=0.0, logit_bias=((5, 1.0), (V + 3, 100.0)))) == [5]
    assert pick(logits, row(seed=1, logit_bias=((5, 100.0),))) == [5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_an_error_of_their_row(bad: float) -> None:
    logits = torch.randn(3, V)
    logits[1, 4] = bad
    rows = [row(temperature=0.0, logprobs=1), row(logprobs=2), row(seed=1, top_p=0.5)]
    samples = Sampler(V).sample(logits, rows)
    assert [s.error is None for s in samples] == [True, False, True]
    assert "not finite" in str(samples[1].error)
    assert samples[1].token_id is None
    assert samples[0].token_id == int(logits[0].argmax())
    all_masked = torch.full((1, V), -math.inf)
    assert Sampler(V).sample(all_masked, [row()])[0].error is not None


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((V,), -math.inf)
    logits[3] = logits[8] = 0.0
    assert frequencies(logits, 200).nonzero().flatten().tolist() == [3, 8]
    assert frequencies(logits, 200, top_p=0.9).nonzero().flatten().tolist() == [3, 8]


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = torch.randn(2, V)
    rows = [row(temperature=0.0, logprobs=3, logit_bias=((11, 100.0),)), row(logprobs=0, seed=4)]
    first, second = Sampler(V).sample(logits, rows)
    want = logits.double().log_softmax(1)
    assert first.token_id == 11
    assert first.logprobs is not None and second.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(want[0, 11]))
    assert first.logprobs.rank == int((want[0] > want[0, 11]).sum()) + 1
    values, ids = want[0].topk(3)
    assert [t for t, _ in first.logprobs.top] == ids.tolist()
    assert [p for _, p in first.logprobs.top] == pytest.approx(values.tolist())
    assert second.logprobs.top == ()
    assert second.logprobs.token_id == second.token_id


def test_token_logprobs_of_many_rows() -> None:
    logits = torch.randn(5, V)
    found = token_logprobs(logits, [0, 1, 2, 3, 4], 2)
    want = logits.double().log_softmax(1)
    assert [f.logprob for f in found] == pytest.approx([float(want[i, i]) for i in range(5)])
    assert all(len(f.top) == 2 for f in found)
    assert token_logprobs(logits[:1], [int(logits[0].argmax())], 0)[0].rank == 1
    assert token_logprobs(torch.empty(0, V), [], 1) == []
    assert len(token_logprobs(logits[:1], [0], V + 5)[0].top) == V
