"""Invariant 11: same request, cache on or off, chunked or not, preempted or not, alone or in a
batch: same tokens and five best log-probabilities, with float32 weights, sums and KV.

Every test asserts that the path was really used; the negative control swaps two cached blocks.
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoints import random_model, random_prompt, save_folder
from model.tiny_engine import Run, TinyEngine, tiny_checkpoint
from pagemill.cache.testing import swap_cached_blocks
from pagemill.core.types import GroupId

CASES = ("llama", "qwen3", "mistral-window", "gemma3")
PROMPT = random_prompt(150)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture
def make(checkpoint: Path, key_file: Path) -> Iterator[Callable[..., TinyEngine]]:
    made: list[TinyEngine] = []

    def build(**settings: Any) -> TinyEngine:
        made.append(TinyEngine(checkpoint, key_file, **settings))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture
def reference(make: Callable[..., TinyEngine]) -> Run:
    """Alone, whole prompt in one chunk, no cache."""
    run = make(prefix_index="off").ask(PROMPT)
    assert run.num_cached_tokens == 0
    return run


def hits(engine: TinyEngine, num_tokens: int) -> int:
    """Of ``num_tokens`` cached ones: all, or whole blocks, as the index and the groups allow."""
    config = engine.engine.cache.config
    if config.prefix_index == "radix" and [group.window for group in config.groups] == [None]:
        return num_tokens
    return num_tokens // config.block_size * config.block_size


@pytest.mark.parametrize("index", ["radix", "flat"])
def test_cache_on_or_off(make: Callable[..., TinyEngine], reference: Run, index: str) -> None:
    engine = make(prefix_index=index)
    engine.ask(PROMPT)
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert again.same_as(reference)


@pytest.mark.parametrize("index", ["radix", "flat"])
def test_a_longer_prompt_over_a_cached_one(make: Callable[..., TinyEngine], index: str) -> None:
    """The next turn: prompt, answer, and more; then with 3 tokens changed near the end."""
    engine, plain = make(prefix_index=index), make(prefix_index="off")
    first = engine.ask(PROMPT)
    turn = [*PROMPT, *first.token_ids[:10], *random_prompt(30)]
    run = engine.ask(turn)
    assert run.num_cached_tokens == hits(engine, 160)
    assert run.same_as(plain.ask(turn))
    changed = [*turn[:-20], 9, 8, 7, *turn[-17:]]
    again = engine.ask(changed)
    assert again.num_cached_tokens == hits(engine, len(turn) - 20)
    assert again.same_as(plain.ask(changed))


@pytest.mark.parametrize("chunk", [1, 7, 16, 61])
def test_chunked_or_not(make: Callable[..., TinyEngine], reference: Run, chunk: int) -> None:
    engine = make(max_num_batched_tokens=chunk, max_num_seqs=1)
    run = engine.ask(PROMPT)
    assert engine.engine.scheduler.stats.num_steps >= len(PROMPT) // chunk
    assert run.same_as(reference)


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_preempted_or_not(case: str, tmp_path: Path, key_file: Path) -> None:
    """Two growing sequences in a pool that holds one and a half. (A model of window layers alone
    holds so few blocks that growth never needs another's.)"""
    model = tiny_checkpoint(tmp_path, case)
    plain = TinyEngine(model, key_file, prefix_index="off")
    engine = TinyEngine(model, key_file, num_blocks=26)
    prompts = (PROMPT, random_prompt(140))
    runs = [engine.add(prompt, max_tokens=120) for prompt in prompts]
    engine.run()
    assert engine.engine.scheduler.stats.num_preemptions > 0
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.same_as(plain.ask(prompt, max_tokens=120))
    engine.close()
    plain.close()


def test_alone_or_in_a_batch(make: Callable[..., TinyEngine], reference: Run) -> None:
    engine = make()
    others = [engine.add(random_prompt(20 + 9 * i), max_tokens=20) for i in range(7)]
    run = engine.add(PROMPT)
    engine.run()
    assert [len(other.token_ids) for other in others] == [20] * 7
    assert engine.engine.scheduler.stats.num_steps < 30, "they did not run side by side"
    assert run.same_as(reference)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_other_block_sizes(
    make: Callable[..., TinyEngine], reference: Run, block_size: int
) -> None:
    engine = make(block_size=block_size, num_blocks=60)
    engine.ask(PROMPT)
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert again.same_as(reference)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_partly_matched_block_is_copied(
    make: Callable[..., TinyEngine], reference: Run, is_swapped: bool
) -> None:
    """With a negative control: that of another prompt in its place must change what comes out."""
    engine, other = make(), random_prompt(170)
    if hits(engine, 149) != 149:
        return  # this model takes whole blocks only: nothing is copied
    longer = [*PROMPT, *random_prompt(60)[30:]]
    engine.ask(longer)
    engine.ask(other)
    cache = engine.engine.cache
    if is_swapped:
        mine, theirs = (
            cache.peek_match(array("I", prompt), cache.namespace()).block_ids(GroupId(0))
            for prompt in (longer, other)
        )
        swap_cached_blocks(cache, GroupId(0), mine[9], theirs[9])
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == 149 and cache.stats().groups[0].num_copies > 0
    assert again.same_as(reference) is not is_swapped


def test_a_swapped_block_is_noticed(make: Callable[..., TinyEngine], reference: Run) -> None:
    """Negative control: a cached block of another prompt in its place must change what comes out.

    (Two blocks of one prompt would not do: attention over all keys does not see their order.)
    """
    engine = make()
    other = random_prompt(151)
    engine.ask(PROMPT)
    engine.ask(other)
    cache = engine.engine.cache
    for group in range(len(cache.config.groups)):
        mine, theirs = (
            cache.peek_match(array("I", prompt), cache.namespace()).block_ids(GroupId(group))
            for prompt in (PROMPT, other)
        )
        assert mine[8] and theirs[8]
        swap_cached_blocks(cache, GroupId(group), mine[8], theirs[8])
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert not again.same_as(reference)


@pytest.mark.parametrize("kv_format", ["fp32", "i8", "i4c"])
def test_a_prefix_that_is_read_once_for_all(tmp_path: Path, key_file: Path, kv_format: str) -> None:
    """Three sequences decode over the same 640 tokens: the plan names the run, the answers are
    those of sequences alone."""
    wide = random_model("llama", max_position_embeddings=1024)
    model = save_folder(wide, tmp_path / "llama")
    settings = {"kv_format": kv_format, "kv_format_force": "on", "num_blocks": 300}
    engine = TinyEngine(model, key_file, **settings)
    prefix = random_prompt(640)
    prompts = [[*prefix, *random_prompt(5 + i)] for i in range(3)]
    engine.ask(prefix, max_tokens=1)
    plan, runs = engine.engine.scheduler.plan, []

    def watched(now_ns: int) -> Any:
        made = plan(now_ns)
        runs.extend(made.shared[0] if made and made.shared else ())
        return made

    engine.engine.scheduler.plan = watched  # type: ignore[method-assign]
    together = [engine.add(prompt) for prompt in prompts]
    engine.run()
    assert {(run.first, run.num_blocks, run.members) for run in runs} >= {(0, 40, (0, 1, 2))}
    plain = TinyEngine(model, key_file, prefix_index="off", **settings)
    for run, prompt in zip(together, prompts, strict=True):
        alone = plain.ask(prompt)
        assert run.same_as(alone) or (kv_format != "fp32" and run.distance(alone) < 0.2)
    engine.close()
    plain.close()
