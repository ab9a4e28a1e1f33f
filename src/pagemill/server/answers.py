"""Answers in the shapes of the OpenAI API: whole and as chunks, chat and text completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.core.request import FinishReason
from pagemill.core.step import TokenLogprobs
from pagemill.engine.engine import Piece, Usage
from pagemill.models.tokenizer import Tokenizer
from pagemill.server.token_form import TokenForms, num_characters

ChoiceValue = dict[str, Any]


def usage_value(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage object over all prompts of a request."""
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    cached = sum(usage.num_cached_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(slots=True)
class Gathered:
    """The pieces of one prompt, put together."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.usage = piece.usage
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


class Answers:
    """Builds the values of one HTTP request: they share an id, a time and a model name."""

    def __init__(self, kind: str, model: str, tokenizer: Tokenizer) -> None:
        self._kind = kind
        self._forms = TokenForms(tokenizer)
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[ChoiceValue], usages: Sequence[Usage]) -> dict[str, Any]:
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": usage_value(usages)}

    def chunk(self, choices: list[ChoiceValue], usages: Sequence[Usage] | None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        value = {**self._head, "object": name, "choices": choices}
        return value if usages is None else {**value, "usage": usage_value(usages)}

    # ------------------------------------------------------------ chat

    def chat_choice(self, got: Gathered, with_logprobs: bool) -> ChoiceValue:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": got.text},
            "logprobs": self._chat_logprobs(got.logprobs) if with_logprobs else None,
            "finish_reason": _reason(got.finish_reason),
            "stop_reason": got.stop_reason,
        }

    def chat_delta(
        self,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> ChoiceValue:
        return {
            "index": 0,
            "delta": delta,
            "logprobs": None if logprobs is None else self._chat_logprobs(logprobs),
            "finish_reason": _reason(finish_reason),
            "stop_reason": stop_reason,
        }

    def _chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for entry in entries:
            top = [self._chat_token(token_id, value) for token_id, value in entry.top]
            content.append({**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._forms.both(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    # ------------------------------------------------------------ text

    def text_choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> ChoiceValue:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": _reason(finish_reason),
            "stop_reason": stop_reason,
        }

    def text_logprobs(
        self,
        entries: Sequence[TokenLogprobs],
        *,
        first_token_id: int | None = None,
        offset: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """The lists of the completions API, and the offset in the text after them.
        ``first_token_id`` is an echoed prompt's first token, which nothing predicts: its
        log-probability is null."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []

        def add(token_id: int, text: str, value: float | None, top: dict[str, float] | None) -> int:
            tokens.append(text)
            values.append(value)
            tops.append(top)
            offsets.append(offset)
            return offset + num_characters([self._forms.both(token_id)[1]])

        if first_token_id is not None:
            offset = add(first_token_id, self._forms.both(first_token_id)[0], None, None)
        for entry in entries:
            text, top = self._forms.alternatives(entry)
            offset = add(entry.token_id, text, entry.logprob, top)
        value = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return value, offset


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
