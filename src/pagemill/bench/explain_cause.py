"""Why two prompts part although the text behind is the same, and what to do about it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagemill.bench.explain_align import Relative
from pagemill.bench.explain_read import LoggedRequest
from pagemill.bench.explain_tokens import Prompt, Prompts, content_text
from pagemill.core.errors import RequestError

MAX_VALUE_TOKENS = 256
"""A longer difference is another text, not a value that changes."""
END_TOKENS = 8
"""The start of an answer that a template writes at the end of a prompt is at most this long."""

ADVICE = {
    "volatile": "move it behind the stable part, or drop it: all behind it is computed again",
    "template": "the chat template writes this old message differently once it is old: use a"
    " template that keeps what it wrote (--chat-template)",
    "tools": "send the tools in one fixed order",
    "keys": "write JSON with one fixed order of keys (json.dumps(..., sort_keys=True))",
    "order": "the same words come in another order: sort them before they are written",
    "whitespace": "write the same spaces and line ends each time",
    "removed": "text was cut out of the beginning or middle: cut seldom and in large steps, or at"
    " the end",
    "inserted": "text was put in front of what was there: append it at the end",
    "repeated": "nothing: the same text stands behind different text",
}
IS_FAULT = {kind: kind != "repeated" for kind in ADVICE}
_VALUES = (
    ("a date or time", re.compile(r"\d{1,4}[-/:.]\d{1,2}([-/:.]\d{1,4})?|\d{1,2}\s*[ap]m", re.I)),
    ("an id", re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}|\b(?=\w*\d)(?=\w*[a-z])\w{4,}\b", re.I)),
    ("a number", re.compile(r"\d")),
)
_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a prompt parts from an earlier one. Texts are whole where short, else their start."""

    kind: str
    what: str
    message: int | None
    """Of a chat: the message where the prompts part, counted from 0."""
    token: int
    """The first differing token, counted from 0 in the prompt."""
    token_text: str
    before: str
    was: str
    now: str
    lost_tokens: int
    also: str = ""
    """A difference further behind, which costs again once this one is gone."""

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


def find_cause(
    request: LoggedRequest, prompt: Prompt, relative: Relative, prompts: Prompts
) -> Cause:
    """``relative`` has at least one run."""
    old = relative.earlier.prompt.token_ids
    d, first = relative.num_equal, relative.runs[0]
    longest = max(relative.runs, key=lambda run: run.length)
    was, now = old[d : max(d, first.was)], prompt.token_ids[d : first.now]
    message = _message_at(request, prompt, relative)
    texts = prompts.text_of(was[:MAX_VALUE_TOKENS]), prompts.text_of(now[:MAX_VALUE_TOKENS])
    wide = prompts.text_of(old[d : longest.was]), prompts.text_of(prompt.token_ids[d : longest.now])
    swap = _Swap(request, prompt, relative, prompts)
    kind = _kind(swap, message, texts, wide, (len(was), len(now)))
    return Cause(
        kind=kind,
        what=_what(kind, *_widened(prompts, prompt.token_ids, d, texts)),
        message=message,
        token=d,
        token_text=prompts.text_of(prompt.token_ids[d : d + 1]),
        before=prompts.text_of(prompt.token_ids[max(0, d - 16) : d]),
        was=_short(prompts.text_of(old[d : d + 24])),
        now=_short(prompts.text_of(prompt.token_ids[d : d + 24])),
        lost_tokens=relative.lost_tokens,
        also=_also(swap, kind),
    )


class _Swap:
    """Asks what would have been written with a part of the earlier request in this one: a part that
    moves the first difference is where the first difference lies."""

    def __init__(
        self, request: LoggedRequest, prompt: Prompt, relative: Relative, prompts: Prompts
    ) -> None:
        self.request, self.relative = request, relative
        self.earlier = relative.earlier.request
        self._text, self._was, self._prompts = prompt.text, relative.earlier.prompt.text, prompts

    def is_first(self, **part: Any) -> bool:
        text = self._written(**part)
        return _common_characters(text, self._was) > _common_characters(self._text, self._was)

    def is_written(self, **part: Any) -> bool:
        return self._written(**part) != self._text

    def _written(self, **part: Any) -> str:
        try:
            return self._prompts.chat_text(replace(self.request, **part))
        except RequestError:  # the template refuses the mixture
            return self._text


def _kind(
    swap: _Swap,
    message: int | None,
    texts: tuple[str, str],
    wide: tuple[str, str],
    sizes: tuple[int, int],
) -> str:
    request, relative, earlier = swap.request, swap.relative, swap.earlier
    d, old = relative.num_equal, relative.earlier.prompt.token_ids
    if d >= len(old) - END_TOKENS or relative.runs[0].was < d - END_TOKENS:
        return "repeated"  # a turn that grows, and says again what was said
    if request.messages and earlier.messages:
        kind = _kind_of_chat(swap, message)
        if kind is not None:
            return kind
    was, now = texts
    if "".join(was.split()) == "".join(now.split()):
        return "whitespace"
    words = [sorted(_WORDS.findall(text)) for text in wide]
    if len(words[0]) >= 4 and words[0] == words[1]:
        return "order"
    if sizes[1] == 0:
        return "removed"
    if max(sizes) > MAX_VALUE_TOKENS or relative.lost_tokens < 2 * max(sizes):
        return "repeated"
    return "inserted" if sizes[0] == 0 else "volatile"


def _kind_of_chat(swap: _Swap, message: int | None) -> str | None:
    request, earlier = swap.request, swap.earlier
    if _written(request.tools) != _written(earlier.tools) and swap.is_first(tools=earlier.tools):
        return _kind_of_tools(request, earlier)
    if message is None or message >= min(len(request.messages), len(earlier.messages)):
        return None
    here, there = request.messages[message], earlier.messages[message]
    if request.messages[: message + 1] == earlier.messages[: message + 1]:
        if _written((here,)) == _written((there,)):
            return "template"
    if _as_json(here) is not None and _as_json(here) == _as_json(there):
        parts = {name: there[name] for name in ("content", "tool_calls") if name in there}
        after = request.messages[message + 1 :]
        mixed = (*request.messages[:message], {**here, **parts}, *after)
        return "keys" if swap.is_first(messages=mixed) else None
    return None


def _kind_of_tools(request: LoggedRequest, earlier: LoggedRequest) -> str | None:
    if _sorted_keys(request.tools) == _sorted_keys(earlier.tools):
        return "keys"
    if sorted(_sorted_keys(request.tools)) == sorted(_sorted_keys(earlier.tools)):
        return "tools"
    return None


def _also(swap: _Swap, kind: str) -> str:
    """Tools that changed too, where the template writes them behind the first difference."""
    request, earlier = swap.request, swap.earlier
    is_chat = request.messages and earlier.messages
    if not IS_FAULT[kind] or not is_chat or _written(request.tools) == _written(earlier.tools):
        return ""
    if swap.is_first(tools=earlier.tools) or not swap.is_written(tools=earlier.tools):
        return ""
    found = _kind_of_tools(request, earlier)
    return _what(found, "", "") if found else "other tools"


def _written(values: tuple[Mapping[str, Any], ...]) -> list[str]:
    return [json.dumps(value) for value in values]


def _sorted_keys(values: tuple[Mapping[str, Any], ...]) -> list[str]:
    return [json.dumps(value, sort_keys=True) for value in values]


def _as_json(message: Mapping[str, Any]) -> str | None:
    """The message with its content read as JSON, keys sorted; None where it is no JSON object."""
    if message.get("tool_calls"):
        return json.dumps(message, sort_keys=True)
    try:
        content = json.loads(content_text(message.get("content")))
    except (ValueError, RecursionError):
        return None
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else None


def _message_at(request: LoggedRequest, prompt: Prompt, relative: Relative) -> int | None:
    """The first message that ends behind the place where the texts part. A message that the
    template did not write as it is lies between its neighbours."""
    if not request.messages:
        return None
    place = _common_characters(prompt.text, relative.earlier.prompt.text)
    starts: list[tuple[int, int] | None] = []
    cursor = 0
    for message in request.messages:
        content = content_text(message.get("content")).strip()
        at = prompt.text.find(content, cursor) if content else -1
        starts.append(None if at < 0 else (at, at + len(content)))
        cursor = cursor if at < 0 else at + len(content)
    for i, found in enumerate(starts):
        later = next((s[0] for s in starts[i + 1 :] if s is not None), len(prompt.text) + 1)
        if place < (found[1] if found is not None else later):
            return i
    return len(starts) - 1


def _common_characters(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _widened(prompts: Prompts, new: Any, d: int, texts: tuple[str, str]) -> tuple[str, str]:
    """The differing values with the rest of their word on the left: of 12:3|0 the whole."""
    left = re.search(r"\S*$", prompts.text_of(new[max(0, d - 8) : d]))
    lead = left.group(0) if left else ""
    return lead + texts[0], lead + texts[1]


def _what(kind: str, was: str, now: str) -> str:
    if kind == "volatile":
        name = next((n for n, p in _VALUES if p.search(was) and p.search(now)), "a value")
        return f"{name} that changes"
    return {
        "template": "the template rewrites history",
        "tools": "tools in another order",
        "keys": "JSON keys in another order",
        "order": "the same words in another order",
        "whitespace": "white space that changes",
        "removed": "old text is cut out",
        "inserted": "text is put in front",
        "repeated": "the same text behind different text",
    }[kind]


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
