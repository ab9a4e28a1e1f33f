"""Request bodies -> what the engine is asked. Every refusal names its field."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagemill.core.errors import RequestError
from pagemill.core.request import SamplingParams
from pagemill.core.retention import MAX_BAND
from pagemill.engine.engine import Generate
from pagemill.engine.text import check_stop_strings
from pagemill.models.template import ChatTemplate
from pagemill.models.tokenizer import Tokenizer
from pagemill.server.protocol import (
    MAX_LOGPROBS,
    ChatBody,
    CompletionBody,
    DropBody,
    Sampled,
    message_values,
)
from pagemill.server.retention import retention_of

MAX_ID_DIGITS = 10
NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template FILE,"
    " or use /v1/completions"
)


class Converter:
    """Knows the model's tokenizer, template and limits. Changes nothing; any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: int,
        max_cache_priority: int = MAX_BAND,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_band = max_cache_priority
        self._template = template
        self._max_model_len = max_model_len

    # ------------------------------------------------------------ prompts

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a chat. The template writes the special tokens, so none are added."""
        if self._template is None:
            raise RequestError(NO_TEMPLATE, "messages")
        if not messages:
            raise RequestError("messages is empty: give at least one", "messages")
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        return self.encode(text, name="messages", add_special_tokens=False)

    def encode(
        self, text: str, *, name: str = "prompt", add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids; a text that cannot fit is refused before it is tokenized. ``name`` is the
        field it came in."""
        longest = self._max_model_len * self._tokenizer.max_token_characters
        if len(text) > longest:
            raise RequestError(
                f"the prompt has {len(text)} characters, more than {self._max_model_len} tokens"
                " of context can hold: shorten it",
                name,
            )
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise RequestError(f"{name}: {error}", name) from error

    def prompts(self, body: CompletionBody) -> list[list[int]]:
        """One list of token ids per prompt, whatever form they came in."""
        prompt = body.prompt
        one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        many = [prompt] if one else prompt
        if not many:
            raise RequestError("prompt is empty: give a text or token ids", "prompt")
        return [self._prompt(one, body.add_special_tokens) for one in many]

    def _prompt(self, prompt: object, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            assert isinstance(prompt, list)
            ids = prompt
            self.check_ids(ids, "prompt")
        if not ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        return ids

    def dropped_prompt(self, body: DropBody) -> list[int] | None:
        """Token ids of the prompt that is to be dropped, if the body names one."""
        _check_utf8("cache_salt", body.cache_salt)
        _check_utf8("tenant", body.tenant)
        if body.messages is not None:
            return self.chat_prompt(
                message_values(body.messages),
                body.tools,
                body.add_generation_prompt,
                body.chat_template_kwargs,
            )
        return None if body.prompt is None else self._prompt(body.prompt, body.add_special_tokens)

    def check_ids(self, ids: Sequence[int], name: str) -> None:
        size = self._tokenizer.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"{name} holds the token id {token_id}; the vocabulary has {size} tokens", name
                )

    # ------------------------------------------------------------ requests

    def completion(self, body: CompletionBody, tenant: str) -> list[Generate]:
        """One ask per prompt."""
        echo = bool(body.echo)
        max_tokens = _limit(body, 16, may_be_0=echo)
        _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        sampling = self._sampling(
            body,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
        )
        return [self._ask(body, ids, sampling, max_tokens, tenant) for ids in self.prompts(body)]

    def chat(self, body: ChatBody, tenant: str) -> Generate:
        max_tokens = _limit(body, None)
        _check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        ids = self.chat_prompt(
            message_values(body.messages),
            body.tools,
            body.add_generation_prompt,
            body.chat_template_kwargs,
        )
        ask = self._ask(body, ids, self._sampling(body, logprobs=logprobs), max_tokens, tenant)
        return replace(ask, has_tools=bool(body.tools))

    def _ask(
        self,
        body: Sampled,
        token_ids: list[int],
        sampling: SamplingParams,
        max_tokens: int | None,
        tenant: str,
    ) -> Generate:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        check_stop_strings(stop)
        stop_ids = body.stop_token_ids or []
        self.check_ids(stop_ids, "stop_token_ids")
        _check_utf8("stop", "".join(stop))
        _check_utf8("cache_salt", body.cache_salt)
        _check_utf8("request_id", body.request_id)
        _check_utf8("prompt_cache_key", body.prompt_cache_key)
        _check_range("priority", body.priority, -(1 << 31), (1 << 31) - 1)
        return Generate(
            token_ids=token_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=body.ignore_eos,
            priority=body.priority,
            salt=body.cache_salt or "",
            tenant=tenant,
            retention=retention_of(body, self._max_band),
            skip_special_tokens=body.skip_special_tokens,
            request_id=body.request_id,
        )

    def _sampling(
        self, body: Sampled, *, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        _check_range("seed", body.seed, -(1 << 63), (1 << 63) - 1)
        _check_range("top_k", body.top_k, -1, 1 << 31)

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return SamplingParams(
            temperature=given(body.temperature, 1.0),
            top_p=given(body.top_p, 1.0),
            top_k=body.top_k or 0,
            min_p=given(body.min_p, 0.0),
            presence_penalty=given(body.presence_penalty, 0.0),
            frequency_penalty=given(body.frequency_penalty, 0.0),
            repetition_penalty=given(body.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(body.logit_bias or {}),
            seed=body.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _logit_bias(self, biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        out = []
        for key, bias in biases.items():
            if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
                raise RequestError(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
            if not -100.0 <= bias <= 100.0:
                raise RequestError(f"logit_bias of {key}: must lie in [-100, 100]", "logit_bias")
            out.append((int(key), float(bias)))
        self.check_ids([token_id for token_id, _ in out], "logit_bias")
        return tuple(out)


def _limit(
    body: CompletionBody | ChatBody, default: int | None, *, may_be_0: bool = False
) -> int | None:
    """max_completion_tokens wins over max_tokens; null means the default of each."""
    value = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    _check_range(name, value, 0, 1 << 31)
    if value == 0 and not may_be_0:
        way_out = ", or set echo" if isinstance(body, CompletionBody) else ""
        raise RequestError(f"{name} is 0: ask for at least 1{way_out}", name)
    return default if value is None else value


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}: it must lie between {low} and {high}", name)


def _check_utf8(name: str, text: str | None) -> None:
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds a lone surrogate: send valid UTF-8", name) from error
