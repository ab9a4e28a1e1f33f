"""Request logs as they are found: OpenAI bodies, ShareGPT, plain lines. Read as a stream."""

import gzip
import hashlib
import json
import lzma
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pagemill.core.errors import ConfigError

BODY_FIELDS = ("body", "request", "request_body", "json", "payload")
TIME_FIELDS = ("t", "ts", "time", "timestamp", "created", "created_at", "start_time")
SESSION_FIELDS = ("s", "session", "session_id", "conversation_id", "chat_id", "thread_id")
TENANT_FIELDS = ("tenant", "api_key_hash", "user", "safety_identifier", "organization")
PROMPT_FIELDS = ("prompt", "input", "text")
SESSION_HEADERS = ("x-session-id", "session-id", "x-conversation-id")
OUTPUT_FIELDS = ("output", "response", "completion")
MILLISECONDS_FROM = 1e11
"""A number this large counts milliseconds: as seconds it would be the year 5138."""
MAX_BROKEN_NAMED = 5
PIECE_CHARACTERS = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of a log: messages, or a text, or token ids."""

    where: str
    """File and line, or record, for a person."""
    time_s: float | None = None
    tenant: str = ""
    session: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    output: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Broken:
    """Records that could not be read: how many, and what was wrong with the first. ``is_strict``:
    the first one is raised."""

    is_strict: bool = True
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: ConfigError) -> None:
        if self.is_strict:
            raise error
        self.count += 1
        if len(self.first) < MAX_BROKEN_NAMED:
            self.first.append(str(error))


def read_log(
    path: Path,
    on_bytes: Callable[[int], None] = lambda n: None,
    broken: Broken | None = None,
) -> Iterator[LoggedRequest]:
    """The requests of a log, in its order. A bad record is added to ``broken``, which raises or
    counts it. ConfigError, with file and line, also where no record at all can be read.

    ``.gz`` and ``.xz`` are opened. ``on_bytes`` is told how far the file has been read.
    """
    found, count = broken or Broken(), 0
    num_before = len(found.first)
    try:
        with path.open("rb") as raw:
            for request in _requests(path, raw, on_bytes, found):
                count += 1
                yield request
    except (OSError, EOFError, UnicodeError, lzma.LZMAError) as error:
        what = ConfigError(f"{path} cannot be read as a log: {error}")
        if not count:
            raise what from error
        found.add(what)
    if not count:
        why = "".join(found.first[num_before : num_before + 1])
        raise ConfigError(
            why or f"{path} holds no request: give JSON lines, or a ShareGPT JSON list"
        )


def _requests(
    path: Path, raw: Any, on_bytes: Callable[[int], None], broken: Broken
) -> Iterator[LoggedRequest]:
    opened: Any = raw
    if path.suffix == ".gz":
        opened = gzip.open(raw)
    elif path.suffix == ".xz":
        opened = lzma.open(raw)
    for where, record in _records(path, opened):
        on_bytes(raw.tell())
        try:
            found = list(_of_record(where, _parsed(where, record)))
        except ConfigError as error:
            broken.add(error)
            continue
        yield from found


def _records(path: Path, opened: Any) -> Iterator[tuple[str, Any]]:
    """Of each record where it stands, and its bytes, or what ``_parsed`` takes besides."""
    is_first = True
    for number, raw in enumerate(opened, 1):
        line = raw.lstrip(b"\xef\xbb\xbf \t\r\n") if is_first else raw.strip()
        if not line:
            continue
        if is_first and line.startswith(b"["):
            yield from _list_items(path, line, opened)
            return
        is_first = False
        yield f"{path}:{number}", line


def _parsed(where: str, record: Any) -> Mapping[str, Any]:
    """``record``: the bytes of a line, an item of a list, or what was wrong with it."""
    if isinstance(record, ConfigError):
        raise record
    if isinstance(record, bytes):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: no JSON ({error}); a log has one request a line") from None
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: this is {type(record).__name__}, not a JSON object")
    return record


def _list_items(path: Path, first: bytes, opened: Any) -> Iterator[tuple[str, Any]]:
    """The items of one JSON list, without holding all of it."""
    decoder, number = json.JSONDecoder(), 0
    text, at, rest, is_over = first.decode()[1:], 0, b"", False
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            return
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if is_over:
                where = f"{path}, record {number + 1}"
                yield where, ConfigError(f"{where}: no JSON ({error}); is the file complete?")
                return
            piece = rest + opened.read(max(PIECE_CHARACTERS, len(text) - at))
            is_over = len(piece) == len(rest)
            whole = len(piece) if is_over else _whole_characters(piece)
            text, rest, at = text[at:] + piece[:whole].decode(), piece[whole:], 0
            continue
        number += 1
        yield f"{path}, record {number}", item


def _whole_characters(piece: bytes) -> int:
    """Where the last whole UTF-8 character of ``piece`` ends."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte < 0x80 or byte >= 0xC0:
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(piece) if length <= back else len(piece) - back
    return len(piece)


# ---------------------------------------------------------------- one record


def _of_record(where: str, record: Mapping[str, Any]) -> Iterator[LoggedRequest]:
    body = next((record[f] for f in BODY_FIELDS if isinstance(record.get(f), Mapping)), record)
    both = {**record, **body}
    common: dict[str, Any] = {
        "where": where,
        "time_s": _time(where, both),
        "tenant": _tenant(both),
        "session": _session(both),
        "fields": {
            k: v for k, v in both.items() if isinstance(v, str | int) and k not in PROMPT_FIELDS
        },
    }
    if isinstance(record.get("conversations"), list):
        common["session"] = common["session"] or str(record.get("id") or where)
        yield from _conversation(where, record["conversations"], common)
        return
    if isinstance(body.get("messages"), list):
        messages = body["messages"]
        if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise ConfigError(f"{where}: a message is no object with a role")
        tools = body.get("tools") or ()
        is_list = isinstance(tools, list | tuple)
        if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
            raise ConfigError(f"{where}: a tool is no object, or the tools are no list")
        yield LoggedRequest(messages=tuple(messages), tools=tuple(tools), **common)
        return
    prompt = next((body[f] for f in PROMPT_FIELDS if body.get(f) is not None), None)
    for one in _prompts(where, prompt):
        output = next((both[f] for f in OUTPUT_FIELDS if isinstance(both.get(f), str)), "")
        if isinstance(one, str):
            yield LoggedRequest(text=one, output=output, **common)
        else:
            yield LoggedRequest(token_ids=tuple(one), **common)


def _prompts(where: str, prompt: Any) -> list[Any]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(one, list) and _are_ids(one) for one in prompt):
            return prompt
    raise ConfigError(
        f"{where}: no prompt: a request has messages, or one of {', '.join(PROMPT_FIELDS)}, as text"
    )


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 32 for value in values)


def _conversation(where: str, turns: list[Any], common: dict[str, Any]) -> Iterator[LoggedRequest]:
    """ShareGPT: each turn of a person is a request with all that was said before."""
    messages: list[Mapping[str, Any]] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ConfigError(f"{where}: a turn of the conversation is no object")
        said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = ROLES.get(str(said[0]), str(said[0]))
        messages.append({"role": role, "content": str(said[1] or "")})
        if role == "user":
            yield LoggedRequest(messages=tuple(messages), **common)


def _time(where: str, record: Mapping[str, Any]) -> float | None:
    value = next((record[f] for f in TIME_FIELDS if record.get(f) is not None), None)
    if value is None or isinstance(value, bool):
        return None
    try:
        seconds = _seconds(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {value!r} is no time: give seconds or ISO 8601") from error
    return seconds / 1000 if seconds > MILLISECONDS_FROM else seconds


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = datetime.fromisoformat(value).timestamp()
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    return seconds


def _headers(record: Mapping[str, Any]) -> dict[str, str]:
    headers = record.get("headers")
    if not isinstance(headers, Mapping):
        return {}
    return {str(name).lower(): str(value) for name, value in headers.items()}


def _tenant(record: Mapping[str, Any]) -> str:
    for name in TENANT_FIELDS:
        if isinstance(record.get(name), str | int):
            return str(record[name])
    headers = _headers(record)
    key = headers.get("authorization") or headers.get("x-api-key") or record.get("api_key")
    if not key:
        return ""
    return "key " + hashlib.sha256(str(key).encode()).hexdigest()[:8]  # a key is never shown


def _session(record: Mapping[str, Any]) -> str:
    for name in SESSION_FIELDS:
        if isinstance(record.get(name), str | int):
            return str(record[name])
    headers = _headers(record)
    return next((headers[name] for name in SESSION_HEADERS if name in headers), "")
