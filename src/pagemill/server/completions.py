"""POST /v1/completions: text or token ids, single or batched, whole or streamed."""

from collections.abc import AsyncIterator
from typing import Any

from pagemill.engine.engine import Generate, Piece
from pagemill.models.tokenizer import Tokenizer
from pagemill.server.answers import Answers, ChoiceValue, Gathered
from pagemill.server.errors import describe
from pagemill.server.protocol import CompletionBody
from pagemill.server.stream import DONE, PieceStreams, event


async def gather(streams: PieceStreams, count: int) -> list[Gathered]:
    """All pieces of ``count`` prompts. Raises the error of a prompt that failed."""
    got = [Gathered() for _ in range(count)]
    async for index, piece in streams:
        if piece.error is not None:
            raise piece.error
        got[index].add(piece)
    return got


class Completions:
    """Turns the pieces of one request into its answer."""

    def __init__(
        self, body: CompletionBody, asks: list[Generate], answers: Answers, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._asks = asks
        self._answers = answers
        self._tokenizer = tokenizer

    async def whole(self, streams: PieceStreams) -> dict[str, Any]:
        got = await gather(streams, len(self._asks))
        choices = [self._choice(i, one) for i, one in enumerate(got)]
        return self._answers.whole(choices, [one.usage for one in got])

    def _choice(self, index: int, got: Gathered) -> ChoiceValue:
        text, logprobs = got.text, None
        if self._body.echo:
            text = self._prompt_text(index) + text
        if self._body.logprobs is not None:
            entries = [*got.prompt_logprobs, *got.logprobs]
            first = self._asks[index].token_ids[0] if self._body.echo else None
            logprobs, _ = self._answers.text_logprobs(entries, first_token_id=first)
        return self._answers.text_choice(index, text, logprobs, got.finish_reason, got.stop_reason)

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        one = prompt[index] if prompt and isinstance(prompt[0], str) else None
        if isinstance(one, str):
            return one
        return self._tokenizer.decode(self._asks[index].token_ids, skip_special_tokens=False)

    async def events(self, streams: PieceStreams) -> AsyncIterator[bytes]:
        """Server-sent events, one for each piece that has something to say."""
        options = self._body.stream_options
        always = options is not None and options.continuous_usage_stats
        got = [Gathered() for _ in self._asks]
        offsets = [0] * len(got)
        async for index, piece in streams:
            if piece.error is not None:
                yield event(describe(piece.error)[1])
                break
            is_first = got[index].usage.num_prompt_tokens == 0
            got[index].add(piece)
            choice = self._chunk_choice(index, piece, is_first, offsets)
            if choice is not None:
                usages = [one.usage for one in got] if always else None
                yield event(self._answers.chunk([choice], usages))
        if options is not None and options.include_usage:
            yield event(self._answers.chunk([], [one.usage for one in got]))
        yield DONE

    def _chunk_choice(
        self, index: int, piece: Piece, is_first: bool, offsets: list[int]
    ) -> ChoiceValue | None:
        text = piece.text
        echoes = bool(self._body.echo) and is_first
        if echoes:
            text = self._prompt_text(index) + text
        wants = self._body.logprobs is not None
        entries = [*piece.prompt_logprobs, *piece.logprobs] if wants else []
        if not text and not entries and piece.finish_reason is None:
            return None
        logprobs = None
        if wants:
            first = self._asks[index].token_ids[0] if echoes else None
            logprobs, offsets[index] = self._answers.text_logprobs(
                entries, first_token_id=first, offset=offsets[index]
            )
        return self._answers.text_choice(
            index, text, logprobs, piece.finish_reason, piece.stop_reason
        )
