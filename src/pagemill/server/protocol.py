"""Requests of the OpenAI API: wrong types are refused, unknown fields are counted.

Sources: the OpenAI API reference (chat completions, completions) and vLLM's documented extensions
(top_k, min_p, repetition_penalty, ignore_eos, priority, cache_salt, stop_token_ids).
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationError,
    model_validator,
)

from pagemill.core.errors import RequestError
from pagemill.server import forms

MAX_LOGPROBS = 20

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none"),
    "function_call": (None, "none"),
    "functions": (None, []),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "min_tokens": (None, 0),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "length_penalty": (None, 1, 1.0),
}
"""Fields that change the answer and are not supported yet, with the values that change nothing."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def null_means_the_default(cls, value: Any) -> Any:
        """Clients write null for what they do not set."""
        if not isinstance(value, dict):
            return value
        if len(value) > forms.MAX_FIELDS:
            raise RequestError(f"an object has {len(value)} fields: at most {forms.MAX_FIELDS}")
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {k: v for k, v in value.items() if v is not None or k not in optional}


TokenIds = list[int]
Prompt = Annotated[str | TokenIds | list[str] | list[TokenIds], PlainValidator(forms.prompt_form)]
OnePrompt = Annotated[str | TokenIds, PlainValidator(forms.one_prompt_form)]
Tools = Annotated[list[dict[str, Any]], PlainValidator(forms.tools_form)]
Content = Annotated[str | list[dict[str, Any]], PlainValidator(forms.content_form)]


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(_Body):
    """What chat and text completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], PlainValidator(forms.bias_form)] | None = None
    seed: int | None = None
    stop: Annotated[str | list[str], PlainValidator(forms.stop_form)] | None = None
    stop_token_ids: Annotated[TokenIds, PlainValidator(forms.stop_ids_form)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    cache_priority: int | None = None
    cache_ttl: float | None = None
    cache_pin: bool | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    user: str | None = None


class CompletionBody(Sampled):
    prompt: Prompt
    max_tokens: int | None = 16
    max_completion_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class Message(_Body):
    role: str
    content: Content | None = None


Messages = Annotated[list[Message], BeforeValidator(forms.messages_form)]


class ChatBody(Sampled):
    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DropBody(_Body):
    """What DELETE /v1/cache drops: everything, a tenant's salt, or one prompt under it."""

    model: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    prompt: OnePrompt | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: Annotated[TokenIds, PlainValidator(forms.tokens_form)]


Body = TypeVar("Body", bound=_Body)


def parse(raw: bytes, kind: type[Body], max_model_len: int) -> Body:
    """A body of JSON as ``kind``. Raises RequestError that names the field."""
    forms.refuse_many_parts(raw)
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    forms.refuse_oversized(value, max_model_len)
    _refuse_unsupported(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _refuse_unsupported(value: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in value and not any(_same(value[name], allowed) for allowed in neutral):
            raise RequestError(f"{name} is not supported yet: leave it out", name)


def _same(value: Any, allowed: Any) -> bool:
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _first_problem(error: ValidationError) -> RequestError:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "body"
    field = str(problem["loc"][0]) if problem["loc"] else None
    return RequestError(f"{where}: {problem['msg']}", field)


def unknown_fields(body: BaseModel) -> list[str]:
    """Names of fields that pagemill ignores."""
    return sorted(name for name in body.model_extra or {} if name not in _NEUTRAL)


def message_values(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages for the template: content as one text. Raises RequestError for other parts."""
    return [_message_value(i, message) for i, message in enumerate(messages)]


def _message_value(index: int, message: Message) -> dict[str, Any]:
    value = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        value["content"] = "".join(_part_text(index, part) for part in message.content)
    else:
        value["content"] = message.content or ""
    return value


def _part_text(index: int, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text") or not isinstance(text, str):
        raise RequestError(
            f"messages.{index}.content: a part of type {kind!r}; this model reads text parts only"
            ' ({"type": "text", "text": ...})',
            "messages",
        )
    return text
