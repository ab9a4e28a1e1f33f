"""The root of a chain of block hashes: who may share a prefix with whom.

    root    = HMAC-SHA256(server key; version, fingerprint, tenant, salt, adapter, media ...)
    block 0 = SHA-256(root,    token ids of block 0 as little-endian u32)
    block j = SHA-256(block j - 1, token ids of block j)

Each field of the root is written as one byte that names its kind, its length in four bytes
(little-endian) and its bytes, so no two different sets of fields give the same message. Nothing
here depends on the process: the same key and fields give the same hashes on every machine. HMAC is
RFC 2104, SHA-256 is FIPS 180-4.
"""

from collections.abc import Sequence

from pagemill._native import hmac_sha256

FORMAT_VERSION = 1

_FINGERPRINT, _TENANT, _SALT, _ADAPTER, _MEDIA = b"F", b"T", b"S", b"A", b"M"


def chain_root(
    server_key: bytes,
    fingerprint: bytes,
    tenant: str,
    salt: str,
    adapter: str,
    media: Sequence[str] = (),
) -> bytes:
    """The 32 bytes that the first block's hash starts from. ``media``: hashes of pictures and the
    like, in their order in the prompt."""
    fields = (
        (_FINGERPRINT, fingerprint),
        (_TENANT, tenant.encode()),
        (_SALT, salt.encode()),
        (_ADAPTER, adapter.encode()),
        *((_MEDIA, item.encode()) for item in media),
    )
    message = b"pagemill chain %d" % FORMAT_VERSION
    for kind, value in fields:
        message += kind + len(value).to_bytes(4, "little") + value
    return hmac_sha256(server_key, message)
