"""Who asks: API keys, the tenant behind each, and the operator."""

import hashlib
import hmac

from starlette.requests import Request

from pagemill.core.config import ServerConfig
from pagemill.server.errors import HttpError


class Tenants:
    """One tenant for each API key; without keys everybody is the tenant "".

    Nobody can name another's tenant: it comes from the key, which the client must have, and every
    salt that a client sends counts inside its own tenant.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._names = {key.encode("utf-8", "replace"): tenant_of(key) for key in config.api_keys}
        self._operator_key = (config.operator_key or "").encode("utf-8", "replace")

    @property
    def names(self) -> list[str]:
        """All tenants that can ask."""
        return list(self._names.values()) or [""]

    def tenant(self, request: Request) -> str:
        """Raises HttpError 401 for a missing or wrong key."""
        if not self._names:
            return ""
        given = _given_key(request)
        found = [name for key, name in self._names.items() if hmac.compare_digest(given, key)]
        if not found:
            raise HttpError(
                401,
                "wrong or missing API key: send Authorization: Bearer KEY",
                "authentication_error",
                "invalid_api_key",
            )
        return found[0]

    def operator(self, request: Request) -> str:
        """The tenant "". Raises HttpError 403 unless the operator asks; without any key everybody
        may."""
        if not self._operator_key and not self._names:
            return ""
        if self._operator_key and hmac.compare_digest(_given_key(request), self._operator_key):
            return ""
        way = "send its key" if self._operator_key else "start the server with --operator-key KEY"
        raise HttpError(403, f"only the operator may do this: {way}", "permission_error")


def tenant_of(api_key: str) -> str:
    """The name of the tenant behind a key: 16 hexadecimal digits, which do not give the key away
    (its first bits of SHA-256 under a label)."""
    return hashlib.sha256(b"pagemill tenant " + api_key.encode("utf-8", "replace")).hexdigest()[:16]


def _given_key(request: Request) -> bytes:
    """The bytes that were sent: a header is read as latin-1, whatever the client wrote it in."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""
