"""Words and values: sizes, clocks, streams, settings, requests."""

from array import array

import pytest

from pagemill.core import random as streams
from pagemill.core.clock import SystemClock, VirtualClock
from pagemill.core.config import EngineConfig, ServerConfig
from pagemill.core.errors import ConfigError, IntegrityError, MissingExtraError, RequestError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.core.request import Request, SamplingParams, StopParams
from pagemill.core.types import RequestId, SequenceId
from pagemill.core.units import ceil_div, format_bytes, parse_bytes


def test_sizes_are_read_and_written() -> None:
    assert parse_bytes("2GiB") == parse_bytes(" 2 g ") == 2 << 30
    assert parse_bytes("1.5kb") == 1536
    assert parse_bytes("4096") == 4096
    assert format_bytes(1536 << 20) == "1.5 GiB"
    assert (ceil_div(17, 16), ceil_div(16, 16)) == (2, 1)
    for text in ("", "much", "-1", "1 GG", "1e9"):
        with pytest.raises(ValueError, match="2GiB"):
            parse_bytes(text)


def test_clocks_never_run_backwards() -> None:
    clock = VirtualClock(5)
    clock.advance_ns(7)
    assert clock.now_ns() == 12
    with pytest.raises(AssertionError):
        clock.advance_ns(-1)
    system = SystemClock()
    assert system.now_ns() <= system.now_ns()


def test_streams_repeat_and_do_not_disturb_each_other() -> None:
    one, same, other = (streams.stream(1, name) for name in ("a", "a", "b"))
    assert [one.random() for _ in range(3)] == [same.random() for _ in range(3)]
    assert streams.stream(1, "b").random() == other.random() != streams.stream(2, "b").random()


def test_errors_carry_what_is_wrong() -> None:
    assert RequestError("no", "stop").param == "stop"
    assert "invariant 4" in str(IntegrityError(4, "written"))
    assert "pip install '.[engine]' in pagemill's checkout" in str(
        MissingExtraError("a server", "engine")
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 8}, "choose one of"),
        ({"groups": ()}, "one number of blocks"),
        ({"num_blocks": (1,)}, "hold nothing"),
        ({"prefix_index": "tree"}, "radix, flat, off"),
        ({"eviction": "best"}, "choose one of lru"),
    ],
)
def test_a_cache_that_cannot_work_is_refused(change: dict[str, object], words: str) -> None:
    settings = {"groups": (LayerGroup("full", (0,)),), "num_blocks": (9,), **change}
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**settings)  # the settings are wrong on purpose


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        LayerGroup("w", (0,), 0)


def test_settings_check_themselves() -> None:
    with pytest.raises(ConfigError, match="name a model"):
        EngineConfig(model="")
    with pytest.raises(ConfigError, match="api_key is empty"):
        ServerConfig(api_keys=("",))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"top_k": -5},
        {"presence_penalty": 9.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_sampling_that_means_nothing_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**change)
    assert caught.value.param == next(iter(change))


def test_a_request_counts_its_tokens() -> None:
    request = Request(
        request_id=RequestId("r"),
        sequence_id=SequenceId(1),
        token_ids=array("I", [1, 2, 3]),
        num_prompt_tokens=3,
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=4),
        namespace=b"",
        arrival_ns=0,
    )
    assert request.num_missing_tokens == 3
    request.num_computed_tokens = 3
    request.token_ids.append(9)
    assert (request.num_output_tokens, request.num_missing_tokens) == (1, 1)
