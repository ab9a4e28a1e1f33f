"""Stop strings in streams: nothing of them is ever shown, nothing else is lost."""

import random

import pytest

from model.seeds import fuzz_seeds
from pagemill.core.errors import RequestError
from pagemill.engine.text import StopStrings, check_stop_strings


def cut_at_first(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The naive twin: look at the whole text."""
    met = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not met:
        return text, None
    at, _, stop = min(met)
    return text[:at], stop


@pytest.mark.parametrize("seed", fuzz_seeds(200))
def test_streams_equal_a_look_at_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab.") for _ in range(rng.randrange(40)))
    stops = [
        "".join(rng.choice("ab.") for _ in range(rng.randrange(1, 6)))
        for _ in range(rng.randrange(4))
    ]
    cutter, shown, met, at = StopStrings(stops), "", None, 0
    while at < len(text) and met is None:
        size = rng.randrange(1, 5)
        piece, met = cutter.push(text[at : at + size])
        shown += piece
        at += size
        assert not any(stop in shown for stop in stops)
    if met is None:
        shown += cutter.flush()
        assert (shown, None) == cut_at_first(text, stops)
    else:
        assert (shown, met) == cut_at_first(text[:at], stops)


def test_text_is_held_back_only_while_it_may_be_a_stop() -> None:
    cutter = StopStrings(["END"])
    assert cutter.push("the E") == ("the ", None)
    assert cutter.push("N") == ("", None)
    assert cutter.push("T") == ("ENT", None)
    assert cutter.push("EN") == ("", None)
    assert cutter.push("Dx") == ("", "END")
    assert cutter.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a"] * 65, ["x" * 1025]])
def test_stops_that_no_client_means_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError):
        check_stop_strings(stops)
