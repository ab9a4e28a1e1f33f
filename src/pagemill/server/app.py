"""Routes. Each parses, asks the engine and writes; no logic of the cache lives here."""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagemill.core.config import ServerConfig
from pagemill.core.errors import EngineStoppedError, PagemillError, RequestError
from pagemill.engine.engine import STOPPED, Engine, Generate
from pagemill.models.template import ChatTemplate
from pagemill.server import operate
from pagemill.server.answers import Answers
from pagemill.server.chat import Chat
from pagemill.server.completions import Completions
from pagemill.server.convert import Converter
from pagemill.server.errors import HttpError, error_response
from pagemill.server.forms import max_body_bytes
from pagemill.server.metrics import Metrics
from pagemill.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DropBody,
    TokenizeBody,
    message_values,
    parse,
    unknown_fields,
)
from pagemill.server.stream import EventStream, PieceStreams, or_gone
from pagemill.server.tenants import Tenants

LOG = logging.getLogger("pagemill.server")
QUICK_BODY_BYTES = 16 << 10
"""Bodies up to this size are parsed and tokenized in the server's own thread."""

Handler = Callable[[Request], Awaitable[Response]]
Made = TypeVar("Made")


class App:
    """The HTTP application over one engine."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate | None,
        config: ServerConfig,
        metrics: Metrics,
        *,
        model_names: tuple[str, ...],
        max_model_len: int,
    ) -> None:
        assert engine.tokenizer is not None, "a server needs a tokenizer"
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._config = config
        self._metrics = metrics
        self._names = model_names
        self._max_model_len = max_model_len
        self._max_body_bytes = max_body_bytes(max_model_len)
        self._long_bodies = asyncio.Lock()
        self._started = int(time.time())
        self._converter = Converter(
            engine.tokenizer, template, max_model_len, config.max_cache_priority
        )
        self._tenants = Tenants(config)

    def asgi(self) -> Starlette:
        """The application; every error leaves in the OpenAI shape."""
        guard = self._guard
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", guard(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", guard(self.model), methods=["GET"]),
            Route("/v1/chat/completions", guard(self.chat), methods=["POST"]),
            Route("/v1/completions", guard(self.completions), methods=["POST"]),
            Route("/tokenize", guard(self.tokenize), methods=["POST"]),
            Route("/detokenize", guard(self.detokenize), methods=["POST"]),
            Route("/v1/cache", guard(self.drop_cache, self._tenants.operator), methods=["DELETE"]),
        ]
        handlers: Any = {HTTPException: _http_error, Exception: _any_error}
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False  # a redirect has no error in its body
        return application

    def _guard(self, handler: Handler, who: Callable[[Request], str] | None = None) -> Handler:
        """Check the API key, and turn exceptions of pagemill into answers."""
        who = who or self._tenants.tenant

        async def guarded(request: Request) -> Response:
            try:
                request.state.tenant = who(request)
                return await handler(request)
            except PagemillError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except asyncio.CancelledError:  # the end of the process, and its body never came
                if not self._engine.is_draining:
                    raise
                return error_response(EngineStoppedError(STOPPED))

        return guarded

    # ------------------------------------------------------------ small routes

    async def health(self, request: Request) -> Response:
        """200 while the engine runs, 503 when it drains or its thread has ended."""
        ok = self._engine.is_alive and not self._engine.is_draining
        return JSONResponse({"status": "ok" if ok else "unavailable"}, 200 if ok else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(n) for n in self._names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pagemill",
            "root": self._names[0],
            "max_model_len": self._max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise HttpError(
                404,
                f"there is no model {name!r} here; this server has {', '.join(self._names)}",
                "invalid_request_error",
                "model_not_found",
            )

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give prompt or messages, and not both", "prompt")

        return await self._in_thread(lambda: self._tokenized(body), request)

    def _tokenized(self, body: TokenizeBody) -> Response:
        if body.messages is not None:
            messages = message_values(body.messages)
            ids = self._converter.chat_prompt(messages, body.tools, body.add_generation_prompt)
        else:
            special = body.add_special_tokens
            ids = self._converter.encode(body.prompt or "", add_special_tokens=special)
        value = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        if body.return_token_strs:
            value["token_strs"] = [self._tokenizer.token_text(i) for i in ids]
        return JSONResponse(value)

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)

        def work() -> Response:
            self._converter.check_ids(body.tokens, "tokens")
            text = self._tokenizer.decode(body.tokens, skip_special_tokens=False)
            return JSONResponse({"prompt": text})

        return await self._in_thread(work, request)

    async def drop_cache(self, request: Request) -> Response:
        body = await self._body(request, DropBody, empty=b"{}")
        operate.check(body, self._tenants.names)
        ids = await self._in_thread(lambda: self._converter.dropped_prompt(body), request)
        token_ids = None if ids is None else array("I", ids)
        return JSONResponse(await operate.drop(self._engine, body, token_ids))

    # ------------------------------------------------------------ completions

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        asks = await self._in_thread(
            lambda: self._converter.completion(body, request.state.tenant), request
        )
        answers = Answers("text", body.model or self._names[0], self._tokenizer)
        maker = Completions(body, asks, answers, self._tokenizer)
        return await self._answer(request, asks, bool(body.stream), maker)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        ask = await self._in_thread(
            lambda: self._converter.chat(body, request.state.tenant), request
        )
        answers = Answers("chat", body.model or self._names[0], self._tokenizer)
        return await self._answer(request, [ask], bool(body.stream), Chat(body, answers))

    async def _answer(
        self, request: Request, asks: list[Generate], stream: bool, maker: Chat | Completions
    ) -> Response:
        streams = PieceStreams(self._engine, asks)
        if stream:
            return EventStream(maker.events(streams), streams.close)
        try:

            async def work() -> Response:
                return JSONResponse(await maker.whole(streams))

            return await or_gone(request, work())
        finally:
            streams.close()

    async def _body(self, request: Request, kind: type[Body], empty: bytes = b"") -> Body:
        """The parsed body. The model's name is checked, unknown fields are counted. ``empty``
        stands for no body at all."""
        raw = await self._read(request) or empty
        request.state.is_long = len(raw) > QUICK_BODY_BYTES
        body = await self._in_thread(lambda: parse(raw, kind, self._max_model_len), request)
        self._check_model(getattr(body, "model", None))
        for name in unknown_fields(body):
            self._metrics.count(self._metrics.unknown_fields, self._metrics.field_label(name))
        return body

    async def _in_thread(self, work: Callable[[], Made], request: Request) -> Made:
        """Handle long bodies beside the server's own thread, so that streams go on; one at a time,
        so that a few of them cannot take all memory or starve that thread of the interpreter."""
        if not request.state.is_long:
            return work()
        async with self._long_bodies:
            return await asyncio.to_thread(work)

    async def _read(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise HttpError(
                    413,
                    f"the body is over {self._max_body_bytes} bytes, the most that this server"
                    f" takes (its context is {self._max_model_len} tokens): send less at once",
                    "invalid_request_error",
                )
            parts.append(part)
        return b"".join(parts)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not allowed"}
    message = words.get(error.status_code, str(error.detail))
    return error_response(HttpError(error.status_code, message, "invalid_request_error"))


async def _any_error(request: Request, error: Exception) -> Response:
    LOG.error("%s failed", request.url.path, exc_info=error)
    return error_response(error)
