"""Exceptions of pagemill as answers in the OpenAI error shape."""

from starlette.responses import JSONResponse

from pagemill.core.errors import (
    EngineStoppedError,
    PagemillError,
    QueueFullError,
    RequestError,
    TooLongError,
)


class HttpError(PagemillError):
    """An answer that is an error and no PagemillError of the engine: 401, 404, 405, 413."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


def error_value(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    """The OpenAI error object. Characters that UTF-8 cannot carry are replaced."""
    clean = message.encode("utf-8", "replace").decode("utf-8")
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, object], dict[str, str]]:
    """(status, body, headers) of an exception; unknown ones say nothing of the inside."""
    if isinstance(error, HttpError):
        return error.status, error_value(str(error), error.kind, None, error.code), {}
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        return 400, error_value(str(error), "invalid_request_error", error.param, code), {}
    if isinstance(error, QueueFullError):
        value = error_value(str(error), "rate_limit_error", None, "queue_full")
        return 429, value, {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, EngineStoppedError):
        return 503, error_value(str(error), "service_unavailable_error", None, None), {}
    words = "the server failed on this request; its log has the details"
    return 500, error_value(words, "server_error", None, None), {}


def error_response(error: Exception) -> JSONResponse:
    status, value, headers = describe(error)
    return JSONResponse(value, status_code=status, headers=headers)
