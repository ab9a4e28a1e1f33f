"""One tree of exceptions. *Not now* is a return value; a bug is an assertion; these are the rest.

    PagemillError
    ├── ConfigError          a setting, a flag, a file of settings is wrong
    ├── ModelError           the model, its tokenizer or its template cannot be used
    ├── RequestError         a request cannot be served as it is (HTTP 400)
    │   └── TooLongError     it can never fit the context or the pool
    ├── QueueFullError       too many requests wait (HTTP 429)
    ├── EngineStoppedError   the engine drains or has failed (HTTP 503)
    ├── ControlError         a measurement's own control failed: its figures mean nothing
    ├── IntegrityError       the cache broke one of its invariants
    └── MissingExtraError    an optional part is not installed; the message names the pip command

Each message says what to do.
"""


class PagemillError(Exception):
    """Root of all errors that pagemill raises on purpose."""


class ConfigError(PagemillError):
    """A setting, a flag or a file of settings is wrong."""


class ModelError(PagemillError):
    """The model, its tokenizer or its chat template cannot be used."""


class RequestError(PagemillError):
    """A request cannot be served as it is. ``param`` is the field that is wrong, where one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLongError(RequestError):
    """A request that can never fit the context or the block pool."""


class QueueFullError(PagemillError):
    """Too many requests wait. ``retry_after_s``: a guess of the seconds until there is room."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(PagemillError):
    """The engine drains, has been closed, or has failed."""


class ControlError(PagemillError):
    """A control of a measurement failed, so that its figures mean nothing."""


class IntegrityError(PagemillError):
    """The cache broke one of its invariants. ``invariant`` is its number in docs/design.md."""

    def __init__(self, invariant: int, message: str) -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant = invariant


def install_command(extra: str) -> str:
    """What brings an optional part, said in a checkout: pagemill is in no package registry."""
    return f"pip install '.[{extra}]'"


class MissingExtraError(PagemillError):
    """An optional part is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        command = install_command(extra)
        super().__init__(f"{what} needs an optional part: {command} in pagemill's checkout")
        self.extra = extra
