"""CacheRun: forks and turns through the cache give what one cold pass gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.checkpoints import random_model, random_prompt, reference_logits, save_folder
from pagemill.core.errors import ConfigError
from pagemill.engine.kv_choice import key_centers
from pagemill.kernels.layout import KV_FORMATS
from pagemill.models.decoder import Decoder
from pagemill.models.loader import Model, load_model
from pagemill.runtime.cache_run import CacheRun, KvChoice, open_decoder
from pagemill.runtime.compare import compare

CASES = ("smollm", "qwen2", "gemma3")
CONTEXT = random_prompt(101)
QUESTIONS = [random_prompt(9), random_prompt(23), random_prompt(16)]
Loaded = tuple[Any, Model, Decoder]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def make(case: str) -> Loaded:
        if case not in made:
            reference = random_model(case)
            folder = save_folder(reference, tmp_path_factory.mktemp(case))
            model = load_model(folder, torch.float32)
            made[case] = reference, model, Decoder(model.config, model.weights, 512)
        return made[case]

    return make


def new_run(decoder: Decoder, kv_format: str = "fp32", chunk_tokens: int = 40) -> CacheRun:
    run = CacheRun(decoder, KvChoice(kv_format), 400, 8)
    run.prefill(CONTEXT, chunk_tokens)
    return run


def logits(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(hidden)


@pytest.mark.parametrize("case", CASES)
def test_forks_equal_a_cold_pass_of_transformers(
    loaded: Callable[[str], Loaded], case: str
) -> None:
    """Packed with others, over shared blocks and a copied tail, twice: the same logits."""
    reference, _, decoder = loaded(case)
    run = new_run(decoder)
    for _ in range(2):
        for question, hidden in zip(QUESTIONS, run.ask(QUESTIONS), strict=True):
            expected = reference_logits(reference, [*CONTEXT, *question, 0])[len(CONTEXT) :]
            assert (logits(decoder, hidden) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_later_turn_reuses_the_first_with_its_answer(
    loaded: Callable[[str], Loaded], case: str
) -> None:
    reference, _, decoder = loaded(case)
    run = new_run(decoder)
    run.ask(QUESTIONS[:2])
    run.adopt(1)
    assert run.num_tokens == len(CONTEXT) + len(QUESTIONS[1])
    (hidden,) = run.ask(QUESTIONS[2:])
    whole = [*CONTEXT, *QUESTIONS[1], *QUESTIONS[2]]
    expected = reference_logits(reference, [*whole, 0])[run.num_tokens :]
    assert (logits(decoder, hidden) - expected).abs().max() < 1e-3


def test_questions_leave_the_trunk_as_it_was_and_give_their_blocks_back(
    loaded: Callable[[str], Loaded],
) -> None:
    _, _, decoder = loaded("smollm")
    run = new_run(decoder)
    before = [run.trunk_kv(layer) for layer in range(decoder.config.num_layers)]
    free = len(run._empty)
    for _ in range(20):
        run.ask(QUESTIONS)
    for layer, (k, v) in enumerate(before):
        now = run.trunk_kv(layer)
        assert torch.equal(k, now[0]) and torch.equal(v, now[1])
    for _ in range(4):
        run.ask(QUESTIONS[:1])
        run.adopt(0)
    run._release_forks()
    grown = -(-run.num_tokens // 16) - -(-len(CONTEXT) // 16)
    assert len(run._empty) == free - grown
    assert not set(run._empty) & set(run._trunk.table)


def test_the_same_run_twice_is_equal_to_the_bit(loaded: Callable[[str], Loaded]) -> None:
    _, _, decoder = loaded("qwen2")
    one, two = (new_run(decoder).ask(QUESTIONS) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        scores = compare(decoder, first, second, [5] * len(first))
        assert scores.kl.max() == 0 and not scores.flip.any()


def test_recoded_kv_is_the_sources(loaded: Callable[[str], Loaded]) -> None:
    _, _, decoder = loaded("gemma3")
    source = new_run(decoder)
    same, coded = (CacheRun(decoder, KvChoice(name), 400, 8) for name in ("fp32", "bf16"))
    same.recode(source, 101)
    coded.recode(source, 77)
    for layer in range(decoder.config.num_layers):
        for exact, copied, rounded in zip(
            source.trunk_kv(layer), same.trunk_kv(layer), coded.trunk_kv(layer), strict=True
        ):
            assert torch.equal(exact, copied)
            assert torch.equal(exact[:77].bfloat16().float(), rounded)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_forks_of_a_format_equal_a_cold_pass_in_it(
    loaded: Callable[[str], Loaded], case: str, kv_format: str
) -> None:
    """Tail slots are copied with the fork, adopted with the turn, and coded when they are full."""
    _, _, decoder = loaded(case)
    run, exact = new_run(decoder, kv_format), new_run(decoder)
    expected = exact.ask(QUESTIONS[1:])
    for question, hidden, other in zip(
        QUESTIONS[1:], run.ask(QUESTIONS[1:]), expected, strict=True
    ):
        cold = CacheRun(decoder, KvChoice(kv_format), 400, 8)
        cold.prefill([*CONTEXT, *question[:-1]], 40)
        (last,) = cold.ask([question[-1:]])
        same = compare(decoder, hidden[-1:], last, [5]).kl.max()
        away = compare(decoder, other, hidden, [5] * len(hidden)).kl.mean()
        assert same < 1e-6 + 0.3 * away, (same, away)
    run.adopt(0)
    (second,) = run.ask(QUESTIONS[:1])
    cold = CacheRun(decoder, KvChoice(kv_format), 400, 8)
    cold.prefill([*CONTEXT, *QUESTIONS[1]], 40)
    (again,) = cold.ask(QUESTIONS[:1])
    assert compare(decoder, second, again, [5] * len(again)).kl.mean() < 1e-6 + 0.3 * away


@pytest.mark.parametrize("kv_format", KV_FORMATS[1:])
def test_recoding_keeps_to_the_source(loaded: Callable[[str], Loaded], kv_format: str) -> None:
    """Store mode: the exact KV through every format, centers included, gives nearly its answers."""
    _, model, decoder = loaded("qwen2")
    source, centers = new_run(decoder), key_centers(model.config, model.weights)
    run = CacheRun(decoder, KvChoice(kv_format, centers), 400, 8)
    run.recode(source, len(CONTEXT))
    for exact, coded in zip(source.ask(QUESTIONS), run.ask(QUESTIONS), strict=True):
        kl = compare(decoder, exact, coded, [5] * len(exact)).kl.mean()
        assert 0 < kl < (1e-3 if kv_format in ("bf16", "i8") else 0.1)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_damage_is_seen_in_every_answer(loaded: Callable[[str], Loaded], kv_format: str) -> None:
    _, _, decoder = loaded("smollm")
    run, damaged = new_run(decoder, kv_format), new_run(decoder, kv_format)
    damaged.poison()
    for sound, broken in zip(run.ask(QUESTIONS), damaged.ask(QUESTIONS), strict=True):
        assert compare(decoder, sound, broken, [5] * len(sound)).kl.mean() > 0.03


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "i8", "i4c"])
def test_bytes_of_the_context(loaded: Callable[[str], Loaded], kv_format: str) -> None:
    _, model, decoder = loaded("gemma3")
    config = model.config
    run = new_run(decoder, kv_format)
    seen = sum(101 if w is None else min(101, w - 1) for w in config.windows)
    raw = 5 * len(config.windows) if kv_format == "i4c" else 0  # 101 = 6 groups of 16 and 5
    width = 2 * config.num_kv_heads * config.head_dim
    each = {"fp32": 4 * width, "bf16": 2 * width, "i8": width + 4, "i4c": 192 // 16 + width // 2}
    assert config.num_kv_heads == 1 and config.head_dim == 32
    assert run.context_bytes() == (seen - raw) * each[kv_format] + raw * each["bf16"]


def test_scores_against_a_plain_formula(loaded: Callable[[str], Loaded]) -> None:
    _, _, decoder = loaded("smollm")
    (p,), (q,) = new_run(decoder).ask(QUESTIONS[:1]), new_run(decoder, "bf16").ask(QUESTIONS[:1])
    targets = list(range(10, 10 + len(p)))
    scores = compare(decoder, p, q, targets)
    log_p = logits(decoder, p).double().log_softmax(-1)
    log_q = logits(decoder, q).double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
    assert abs(scores.kl - kl).max() < 1e-6 and kl.min() > 0
    assert abs(scores.nll + log_q[range(len(p)), targets].numpy()).max() < 1e-5
    assert (scores.right == (log_q.argmax(-1) == torch.tensor(targets)).numpy()).all()
    best = log_p.topk(2).values
    assert abs(scores.margin - (best[:, 0] - best[:, 1]).numpy()).max() < 1e-5


def test_states_that_are_no_numbers_are_infinitely_wrong(
    loaded: Callable[[str], Loaded],
) -> None:
    _, _, decoder = loaded("smollm")
    (p,) = new_run(decoder).ask(QUESTIONS[:1])
    broken = p.clone()
    broken[0] = torch.nan
    scores = compare(decoder, p, broken, [5] * len(p))
    assert scores.kl[0] == float("inf") and scores.kl[1:].max() == 0


def test_lengths_that_no_context_can_have(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_folder(random_model("smollm"), tmp_path_factory.mktemp("short"))
    with pytest.raises(ConfigError, match="was made for 512 positions"):
        open_decoder(str(folder), (512, 1024))
    _, decoder = open_decoder(str(folder), (512, 1024), is_exact=False)
    assert len(decoder._cos_sin) == 512
