"""Who may share with whom: roots and chains of block hashes."""

import hashlib
import hmac
import itertools
import subprocess
import sys
from array import array

import pytest

from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill._native import chain_hash, hmac_sha256
from pagemill.cache.keys import chain_root

CONFIG = CacheConfig((LayerGroup("full", (0,)),), (8,))


def test_tagged_keys() -> None:
    """Salt "x" is not adapter "x"; and no field runs into the next."""
    fields = ("tenant", "salt", "adapter")
    cache = CacheManager(CONFIG)
    given = [{}]
    for text in ("x", "xS", "S\x01\0\0\0x", "\0"):
        given += [{name: text} for name in fields]
        given += [{a: text, b: text} for a, b in itertools.combinations(fields, 2)]
    given += [{"tenant": "x", "salt": "S"}, {"salt": "x", "adapter": "A"}]
    given += [{"tenant": "ab", "salt": "c"}, {"tenant": "a", "salt": "bc"}]
    roots = [cache.namespace(**some) for some in given]
    roots += [CacheManager(CONFIG, fingerprint=b"x").namespace()]
    roots += [CacheManager(CONFIG, server_key=b"x").namespace()]
    assert len(set(roots)) == len(roots)
    assert cache.namespace(salt="x") == CacheManager(CONFIG).namespace(salt="x")


def test_the_root_is_what_its_docstring_says() -> None:
    fields = b"F\x02\0\0\0fpT\x01\0\0\0tS\0\0\0\0A\x02\0\0\0\xc3\xa4"
    message = b"pagemill chain 1" + fields
    expected = hmac.digest(b"key", message, "sha256")
    assert chain_root(b"key", b"fp", "t", "", "ä") == expected


@pytest.mark.parametrize("block_size", (16, 32, 64, 128))
def test_the_chain_is_sha256_of_parent_and_tokens(block_size: int) -> None:
    tokens = array("I", [(i * 2654435761) % (1 << 32) for i in range(block_size * 5 + 3)])
    key, expected = b"r" * 32, b""
    for j in range(5):
        part = tokens[j * block_size : (j + 1) * block_size]
        key = hashlib.sha256(key + part.tobytes()).digest()
        expected += key
    assert chain_hash(b"r" * 32, tokens, block_size) == expected


@pytest.mark.parametrize("key_bytes", (0, 1, 32, 64, 65, 200))
def test_hmac_is_rfc_2104(key_bytes: int) -> None:
    for length in (0, 1, 55, 56, 63, 64, 65, 300):
        key, message = b"k" * key_bytes, bytes(range(256))[:length] * 1
        assert hmac_sha256(key, message) == hmac.digest(key, message, "sha256")


PUBLISH = """
from array import array
from pagemill import CacheConfig, CacheManager, LayerGroup
config = CacheConfig((LayerGroup("full", (0,)),), (8,))
cache = CacheManager(config, server_key={key!r}, fingerprint=b"m", on_event=print_event)
root = cache.namespace(tenant="t")
tokens = array("I", range(64))
table = cache.open(cache.peek_match(tokens, root), root)
cache.extend(table, 64)
cache.commit(table, tokens, 64)
"""


def hashes_of_another_process(key: bytes) -> list[str]:
    program = "print_event = lambda event: print(event.block_hash.hex())\n" + PUBLISH
    command = [sys.executable, "-I", "-c", program.format(key=key)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_stable_keys() -> None:
    """Two processes with one server key agree; with another key no hash is the same."""
    first, second = hashes_of_another_process(b"one"), hashes_of_another_process(b"one")
    other = hashes_of_another_process(b"two")
    assert first == second and len(set(first)) == 4
    assert not set(first) & set(other) and len(other) == 4
