"""What /metrics says of requests: counts and sums that must agree with each other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from model.live_server import LiveServer

NAMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_decode_time_seconds",
)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., LiveServer], smollm2: Path) -> LiveServer:
    return start_server(smollm2, num_blocks=200)


def sums(server: LiveServer) -> dict[str, tuple[float, float]]:
    return {n: (server.metric(n + "_count"), server.metric(n + "_sum")) for n in NAMES}


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_first_tokens_and_gaps_are_counted_once(server: LiveServer, max_tokens: int) -> None:
    """n requests have n first tokens, and every other token is one gap."""
    before = sums(server)
    body = {"prompt": ["One", "Two", "Three"], "max_tokens": max_tokens, "ignore_eos": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    server.wait_idle()
    after = sums(server)
    counts = {name: after[name][0] - before[name][0] for name in NAMES}
    seconds = {name: after[name][1] - before[name][1] for name in NAMES}
    ttft, itl, e2e, decode = NAMES
    assert usage["completion_tokens"] == 3 * max_tokens
    assert (counts[ttft], counts[itl], counts[e2e]) == (3, 3 * max_tokens - 3, 3)
    # first tokens and gaps together are the whole time, but for what follows the last token
    assert seconds[itl] == pytest.approx(seconds[decode], abs=0.1)
    assert seconds[ttft] + seconds[itl] == pytest.approx(seconds[e2e], abs=0.1)


def test_a_stop_string_ends_the_count_too(server: LiveServer) -> None:
    body = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    before = sums(server)
    stop = text.strip()[:3]
    usage = server.post("/v1/completions", {**body, "stop": stop}).json()["usage"]
    server.wait_idle()
    after = sums(server)
    assert after[NAMES[0]][0] - before[NAMES[0]][0] == 1
    assert after[NAMES[1]][0] - before[NAMES[1]][0] == usage["completion_tokens"] - 1
