"""Chat templates: messages -> prompt text, in a sandbox. No torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pagemill.core.errors import MissingExtraError, ModelError, RequestError

MAX_PROMPT_CHARACTERS = 32 << 20
"""A template that writes more than this is broken or hostile."""


class ChatTemplate:
    """A Jinja chat template, compiled once.

    Templates get the variables that the Hugging Face tokenizers give them: ``messages``, ``tools``,
    ``add_generation_prompt``, the special tokens, and the functions ``raise_exception`` and
    ``strftime_now`` (transformers documentation, "Chat templates").
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtraError("a chat template", "engine") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template has an error in line {error.lineno}: {error.message};"
                " give another with --chat-template FILE"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. Raises RequestError when the template refuses the messages."""
        try:
            text = self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(variables or {})},
            )
        except Exception as error:  # a template is foreign code: whatever it raises is its answer
            reason = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
            ) from error
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise RequestError("the chat template wrote a prompt of over 32 MiB", "messages")
        return text


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
