"""Stop strings in a stream: what may be shown, what must wait, where to cut."""

from collections.abc import Sequence

from pagemill.core.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises RequestError for what no client means: too many, too long, or empty."""
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{len(stops)} stop strings: at most {MAX_STOP_STRINGS} are taken", "stop"
        )
    for stop in stops:
        if not stop:
            raise RequestError("a stop string is empty: leave it out", "stop")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop string has {len(stop)} characters: at most {MAX_STOP_CHARACTERS}", "stop"
            )


class StopStrings:
    """Cuts a growing text at the first stop string.

        shown ............ | held back: may be the start of a stop string

    Text is held back only while its end is the start of some stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show, the stop string that was met or None). After a stop nothing is held."""
        if not self._stops:
            return text, None
        text = self._held + text
        met = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            at, stop = min(met, key=lambda found: (found[0], -len(found[1])))
            self._held = ""
            return text[:at], stop
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _num_held(self, text: str) -> int:
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def flush(self) -> str:
        """What was held back, once the text has ended without a stop."""
        held, self._held = self._held, ""
        return held
