"""Lists in request bodies, checked by hand: the first element decides the form, and one pass stops
at the first wrong element. (A union of lists would collect one error per element and form.)

What can never be served is refused by its size before anything looks at its elements.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagemill.core.errors import RequestError, TooLongError
from pagemill.engine.text import MAX_STOP_STRINGS

MAX_PROMPTS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_FIELDS = 256
"""Of one object: OpenAI's and vLLM's have under a hundred."""
BYTES_PER_TOKEN = 8
"""A token id of a body and its comma; tokens of text are shorter on average."""
SMALLEST_BODY_LIMIT_BYTES = 1 << 20
LARGEST_BODY_LIMIT_BYTES = 16 << 20
"""The interpreter's lock is held while JSON is read: more would stop streams for too long."""
MAX_PARTS = 250_000
"""Lists, objects and their fields in one body; reading many costs far more than many bytes do."""

PROMPT_FORM = (
    "prompt: give a text, a list of texts, a list of token ids (0 or more), or a list of such lists"
)
STOP_FORM = "stop: give a text or a list of texts"


def max_body_bytes(max_model_len: int) -> int:
    """No body that can be served is longer: so many prompts that fill the context."""
    wanted = MAX_PROMPTS * max_model_len * BYTES_PER_TOKEN
    return min(max(wanted, SMALLEST_BODY_LIMIT_BYTES), LARGEST_BODY_LIMIT_BYTES)


def refuse_many_parts(raw: bytes) -> None:
    """Raises RequestError before JSON is read. Brackets inside of texts count too: no text that
    fits the context has so many."""
    num_parts = raw.count(b"[") + raw.count(b"{") + raw.count(b'":')
    if num_parts > MAX_PARTS:
        raise RequestError(
            f"the body has {num_parts} lists, objects and fields: at most {MAX_PARTS}; send less"
            " at once"
        )


def refuse_oversized(body: Mapping[str, Any], max_model_len: int) -> None:
    """Raises RequestError for lists that are too long, whatever stands in them."""
    _refuse_many(body, "messages", max_model_len, "the context is that many tokens")
    _refuse_many(body, "tools", max_model_len, "the context is that many tokens")
    _refuse_many(body, "stop", MAX_STOP_STRINGS, words="stop strings")
    _refuse_many(body, "stop_token_ids", MAX_STOP_TOKEN_IDS)
    _refuse_many(body, "tokens", max_model_len, "the context is that many tokens")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            _refuse_long(prompt, max_model_len)
        else:
            _refuse_many(body, "prompt", MAX_PROMPTS, words="prompts")
            for ids in prompt:
                if isinstance(ids, list):
                    _refuse_long(ids, max_model_len)
    biases = body.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has over {MAX_LOGIT_BIAS} entries", "logit_bias")


def _refuse_many(
    body: Mapping[str, Any], name: str, most: int, why: str = "", words: str = ""
) -> None:
    value = body.get(name)
    if isinstance(value, list) and len(value) > most:
        reason = f" ({why})" if why else ""
        raise RequestError(f"{len(value)} {words or name}: at most {most}{reason}", name)


def _refuse_long(ids: Sequence[Any], max_model_len: int) -> None:
    if len(ids) > max_model_len:
        raise TooLongError(
            f"{len(ids)} prompt tokens are more than the context of {max_model_len} tokens:"
            " shorten the prompt",
            "prompt",
        )


# ---------------------------------------------------------------- forms


def prompt_form(value: Any) -> Any:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(PROMPT_FORM, "prompt")
    first = value[0] if value else None
    is_one = _is_text if isinstance(first, str) else _is_ids if isinstance(first, list) else _is_id
    return _all(value, is_one, PROMPT_FORM, "prompt")


def one_prompt_form(value: Any) -> Any:
    """A text or token ids."""
    form = "prompt: give a text or a list of token ids (0 or more)"
    return value if isinstance(value, str) else _all(value, _is_id, form, "prompt")


def stop_form(value: Any) -> Any:
    return value if isinstance(value, str) else _all(value, _is_text, STOP_FORM, "stop")


def tokens_form(value: Any) -> Any:
    return _all(value, _is_id, "tokens: give a list of token ids (0 or more)", "tokens")


def stop_ids_form(value: Any) -> Any:
    return _all(value, _is_id, "stop_token_ids: give a list of token ids", "stop_token_ids")


def tools_form(value: Any) -> Any:
    return _all(value, _is_object, "tools: give a list of objects", "tools")


def messages_form(value: Any) -> Any:
    """Objects that have a role; ``content_form`` looks at their contents."""
    if not isinstance(value, list):
        raise RequestError("messages: give a list of messages", "messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise RequestError(f"messages.{i}: give an object with role and content", "messages")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages.{i}.role: give a text, as user", "messages")
    return value


def content_form(value: Any) -> Any:
    """Of one message: a text or parts."""
    form = "messages: the content of each is a text or a list of parts"
    return value if isinstance(value, str) else _all(value, _is_object, form, "messages")


def bias_form(value: Any) -> Any:
    if not isinstance(value, dict) or not all(map(_is_number, value.values())):
        raise RequestError("logit_bias: give an object of token ids and numbers", "logit_bias")
    return value


def _all(value: Any, is_one: Callable[[Any], bool], form: str, name: str) -> Any:
    if not isinstance(value, list) or not all(map(is_one, value)):
        raise RequestError(form, name)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0  # no bool


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
