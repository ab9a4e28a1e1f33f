"""The engine over coded KV: what was found, recomputed in chunks, preempted or batched agrees with
a plain run of the same format, and each format stays near float32.

Recomputed bytes may differ where a product of another shape rounds another way; so
log-probabilities are compared, with a bound, and a swapped block is the negative control. (These
are random models with large weights: what a format does to real ones, `pagemill quality` says.)
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoints import random_prompt
from model.tiny_engine import TinyEngine, tiny_checkpoint
from pagemill.cache.testing import swap_cached_blocks
from pagemill.core.errors import ConfigError
from pagemill.core.layers import TOKEN_GROUP
from pagemill.core.types import GroupId

FORMATS = ("i8", "f8", "k8v4", "i4c")
CASES = ("llama", "qwen2", "gemma3", "mistral-window")
PROMPT = random_prompt(150)
NEAR = 0.2  # between runs of one format
FOUND = 0.01  # where the same bytes are found and the last token alone is computed again
FROM_FLOAT32 = {"i8": 0.4, "f8": 2.0, "k8v4": 1.6, "i4c": 3.0}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(params=FORMATS)
def make(
    request: pytest.FixtureRequest, checkpoint: Path, key_file: Path
) -> Iterator[Callable[..., TinyEngine]]:
    made: list[TinyEngine] = []

    def build(**settings: Any) -> TinyEngine:
        settings = {"kv_format": request.param, "kv_format_force": "on", **settings}
        made.append(TinyEngine(checkpoint, key_file, **settings))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def hits(engine: TinyEngine, num_tokens: int) -> int:
    """Of ``num_tokens`` cached ones: all, whole groups, or whole blocks."""
    config = engine.engine.cache.config
    size = 1 if [group.window for group in config.groups] == [None] else config.block_size
    size = max(size, TOKEN_GROUP) if config.codes_whole_groups else size
    return num_tokens // size * size


def test_found_or_computed(make: Callable[..., TinyEngine]) -> None:
    engine = make()
    first = engine.ask(PROMPT)
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert again.distance(first) < FOUND
    turn = [*PROMPT, *first.token_ids[:10], *random_prompt(30)]
    run = engine.ask(turn)
    assert run.num_cached_tokens == hits(engine, 160)
    assert run.distance(make(prefix_index="off").ask(turn)) < NEAR


def test_near_float32(make: Callable[..., TinyEngine]) -> None:
    engine = make()
    coded, plain = engine.ask(PROMPT), make(kv_format="fp32").ask(PROMPT)
    assert 0 < coded.distance(plain) < FROM_FLOAT32[engine.built.kv_format]


@pytest.mark.parametrize("block_size", [16, 64])
def test_chunked_batched_or_alone(make: Callable[..., TinyEngine], block_size: int) -> None:
    whole = make(block_size=block_size, num_blocks=100).ask(PROMPT)
    for chunk in (7, 61):
        engine = make(block_size=block_size, num_blocks=100, max_num_batched_tokens=chunk,
                      max_num_seqs=5)  # fmt: skip
        others = [engine.add(random_prompt(20 + 9 * i), max_tokens=20) for i in range(4)]
        run = engine.add(PROMPT)
        engine.run()
        assert [len(other.token_ids) for other in others] == [20] * 4
        assert run.distance(whole) < NEAR


def test_preempted_or_not(make: Callable[..., TinyEngine]) -> None:
    engine, plain = make(num_blocks=26), make(prefix_index="off")
    prompts = (PROMPT, random_prompt(140))
    runs = [engine.add(prompt, max_tokens=120) for prompt in prompts]
    engine.run()
    if engine.engine.cache.config.groups[0].window is None:
        assert engine.engine.scheduler.stats.num_preemptions > 0
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.distance(plain.ask(prompt, max_tokens=120)) < NEAR


def test_a_swapped_block_is_noticed(make: Callable[..., TinyEngine]) -> None:
    engine, other = make(), random_prompt(151)
    first = engine.ask(PROMPT)
    engine.ask(other)
    cache = engine.engine.cache
    for group in range(len(cache.config.groups)):
        mine, theirs = (
            cache.peek_match(array("I", prompt), cache.namespace()).block_ids(GroupId(group))
            for prompt in (PROMPT, other)
        )
        swap_cached_blocks(cache, GroupId(group), mine[8], theirs[8])
    again = engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert again.distance(first) > FOUND


def test_layers_can_be_skipped(make: Callable[..., TinyEngine]) -> None:
    engine = make(kv_skip_layers=("0", "-1"))
    kv_format, num_layers = engine.built.kv_format, engine.built.model.config.num_layers
    assert f"2 of {num_layers} layers bf16" in kv_format
    first, again = engine.ask(PROMPT), engine.ask(PROMPT)
    assert again.num_cached_tokens == hits(engine, 149)
    assert again.distance(first) < FOUND


@pytest.mark.parametrize("name", ["99", "1-0", "first", "-9", "", "0-99"])
def test_layers_that_are_not_there(tmp_path: Path, key_file: Path, name: str) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="kv_skip_layers"):
        TinyEngine(model, key_file, kv_format="i8", kv_skip_layers=(name,))


def test_formats_never_share_a_prefix(tmp_path: Path, key_file: Path) -> None:
    """Invariant 7: the format, the skipped layers and the centers are in the key."""
    model, names = tiny_checkpoint(tmp_path, "qwen2"), set()
    for settings in ({}, {"kv_format": "i8"}, {"kv_format": "i8", "kv_skip_layers": ("0",)}):
        engine = TinyEngine(model, key_file, **settings)
        names.add(engine.engine.cache.namespace())
        engine.close()
    assert len(names) == 3
