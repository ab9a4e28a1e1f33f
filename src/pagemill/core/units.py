"""Sizes, and the arithmetic of blocks."""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MAX_BYTES = 1 << 63
MAX_SHOWN = 40
"""So many characters of a wrong value are worth repeating."""

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}


def ceil_div(count: int, size: int) -> int:
    """How many pieces of ``size`` hold ``count``."""
    return -(-count // size)


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"4g"`` or ``"1000000"`` in bytes. ValueError names the forms it takes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if not found:
        raise ValueError(
            f"{text[:MAX_SHOWN]!r} is not a size: write 2GiB, 512MiB or a number of bytes"
        )
    size = float(found.group(1)) * _UNITS[found.group(2)]
    if size >= MAX_BYTES:
        raise ValueError(f"{text[:MAX_SHOWN]!r} is more than any memory: write 2GiB or 512MiB")
    return int(size)


def format_bytes(num_bytes: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for name, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes:.0f} B"
