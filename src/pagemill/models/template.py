"""Chat templates: messages -> prompt text, in a sandbox. No torch."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pagemill.core.errors import MissingExtraError, ModelError, RequestError

MAX_PROMPT_CHARACTERS = 32 << 20
"""A template that writes more than this is broken or hostile."""
MAX_POWER_BITS = 4096


class ChatTemplate:
    """A Jinja chat template, compiled once.

    Templates get the variables that the Hugging Face tokenizers give them: ``messages``, ``tools``,
    ``add_generation_prompt``, the special tokens, the functions ``raise_exception`` and
    ``strftime_now``, and the tag ``generation`` (transformers documentation, "Chat templates").

    A template comes with a model and is not trusted: no attributes of Python objects, no changes of
    what it is given, and no text, sequence or number that grows without end.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
        except ImportError as error:
            raise MissingExtraError("a chat template", "engine") from error
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ModelError(
                f"the chat template has an error{where}: {getattr(error, 'message', error)};"
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
        """The prompt of a chat. Raises RequestError when the template refuses the messages.

        ``variables`` may set more of what the template reads, not messages or tools.
        """
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._write(given)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code: whatever it raises is its answer
            reason = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
            ) from error

    def _write(self, given: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(given):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT_CHARACTERS:
                raise RequestError(
                    f"the chat template wrote over {MAX_PROMPT_CHARACTERS} characters for these"
                    " messages: send less, or give another template with --chat-template FILE",
                    "messages",
                )
        return "".join(pieces)


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model wrote, for training; here it changes nothing."""

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, with products and sums that stay small."""

        intercepted_binops = frozenset(("*", "**", "+"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    Generation.tags = {"generation"}
    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.add_extension(Generation)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _check_size(operator: str, left: Any, right: Any) -> None:
    sizes = [len(side) if hasattr(side, "__len__") else 0 for side in (left, right)]
    times = [side for side in (left, right) if isinstance(side, int)]
    if operator == "**":
        too_large = len(times) == 2 and left.bit_length() * right > MAX_POWER_BITS
    else:
        size = sum(sizes) if operator == "+" else max(sizes) * max(times, default=1)
        too_large = size > MAX_PROMPT_CHARACTERS
    if too_large:
        raise OverflowError(f"a value of the template grows too large at {operator!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As ``transformers`` has it: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
