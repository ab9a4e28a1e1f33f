"""POST /v1/chat/completions: one chat, whole or streamed."""

from collections.abc import AsyncIterator
from typing import Any

from pagemill.server.answers import Answers, Gathered
from pagemill.server.completions import gather
from pagemill.server.errors import describe
from pagemill.server.protocol import ChatBody
from pagemill.server.stream import DONE, PieceStreams, event


class Chat:
    """Turns the pieces of one chat into its answer."""

    def __init__(self, body: ChatBody, answers: Answers) -> None:
        self._body = body
        self._answers = answers

    async def whole(self, streams: PieceStreams) -> dict[str, Any]:
        (got,) = await gather(streams, 1)
        choice = self._answers.chat_choice(got, bool(self._body.logprobs))
        return self._answers.whole([choice], [got.usage])

    async def events(self, streams: PieceStreams) -> AsyncIterator[bytes]:
        """The role first, then text as it comes, the reason last, then the usage if asked."""
        options = self._body.stream_options
        always = options is not None and options.continuous_usage_stats
        got = Gathered()
        opened = False
        async for _, piece in streams:
            if piece.error is not None:
                yield event(describe(piece.error)[1])
                break
            got.add(piece)
            usages = [got.usage] if always else None
            if not opened:
                opened = True
                role = self._answers.chat_delta({"role": "assistant", "content": ""})
                yield event(self._answers.chunk([role], usages))
            logprobs = piece.logprobs if self._body.logprobs else None
            if piece.text or logprobs or piece.finish_reason is not None:
                delta = {"content": piece.text} if piece.text or logprobs else {}
                choice = self._answers.chat_delta(
                    delta, logprobs, piece.finish_reason, piece.stop_reason
                )
                yield event(self._answers.chunk([choice], usages))
        if options is not None and options.include_usage:
            yield event(self._answers.chunk([], [got.usage]))
        yield DONE
