"""Named, seeded random streams: the same seed and name give the same numbers on every machine."""

import hashlib
import random


def stream(seed: int, name: str) -> random.Random:
    """A generator of its own for ``name``; streams of one seed do not disturb each other."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
