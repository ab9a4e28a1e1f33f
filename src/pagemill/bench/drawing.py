"""Lines, dots and words on a white sheet, written as SVG or, without any library, as PNG."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy
from numpy.typing import NDArray

from pagemill.core.errors import ConfigError

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

# Three pixels by five: an octal digit a row, from the top.
GLYPHS: Mapping[str, str] = MappingProxyType(
    dict(
        zip(
            "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ%,._-:()/ ",
            (
                "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 25755 65656 34443"
                " 65556 74747 74744 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644"
                " 25563 65655 34216 72222 55557 55522 55775 55255 55222 71247 51245 00024 00002"
                " 00007 00700 02020 12221 42224 11244 00000"
            ).split(),
            strict=True,
        )
    )
)
PIXELS = 2
"""Sheet units are pixels of a PNG; a pixel of a glyph is two wide and high."""


@dataclass(frozen=True, slots=True)
class Line:
    """Through ``points``; ``has_dots`` marks them."""

    points: Sequence[Point]
    colour: str
    width: int = 1
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Text whose foot is at ``at``."""

    at: Point
    text: str
    anchor: Anchor = "start"


@dataclass(slots=True)
class Sheet:
    """What to draw, in order."""

    width: int
    height: int
    parts: list[Line | Words] = field(default_factory=list)


def write_sheet(sheet: Sheet, path: Path) -> None:
    """By the ending of the name. ConfigError for another than .svg or .png."""
    if path.suffix.lower() == ".svg":
        path.write_text(_svg(sheet), encoding="utf-8")
    elif path.suffix.lower() == ".png":
        path.write_bytes(_png(_raster(sheet)))
    else:
        raise ConfigError(f"the picture {path}: its name must end in .svg or .png")


def _svg(sheet: Sheet) -> str:
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sheet.width} {sheet.height}"'
        f' font-family="sans-serif" font-size="12"><rect width="{sheet.width}"'
        f' height="{sheet.height}" fill="white"/>'
    ]
    for part in sheet.parts:
        if isinstance(part, Words):
            x, y = part.at
            body.append(
                f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{part.anchor}">{escape(part.text)}'
                "</text>"
            )
            continue
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
        body.append(
            f'<path d="{path}" fill="none" stroke="{part.colour}" stroke-width="{part.width}"/>'
        )
        for x, y in part.points if part.has_dots else ():
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{part.colour}"/>')
    return "\n".join(body) + "</svg>\n"


def _raster(sheet: Sheet) -> NDArray[numpy.uint8]:
    """[height, width, 3]"""
    pixels = numpy.full((sheet.height, sheet.width, 3), 255, numpy.uint8)
    for part in sheet.parts:
        if isinstance(part, Words):
            _write(pixels, part)
            continue
        colour = bytes.fromhex(part.colour.removeprefix("#"))
        for (x0, y0), (x1, y1) in zip(part.points, part.points[1:], strict=False):
            steps = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
            for share in numpy.linspace(0, 1, steps + 1):
                _square(pixels, x0 + share * (x1 - x0), y0 + share * (y1 - y0), part.width, colour)
        for x, y in part.points if part.has_dots else ():
            _square(pixels, x, y, 6, colour)
    return pixels


def _square(pixels: NDArray[numpy.uint8], x: float, y: float, size: int, colour: bytes) -> None:
    left, top = max(0, round(x - size / 2)), max(0, round(y - size / 2))
    pixels[top : top + size, left : left + size] = list(colour)


def _write(pixels: NDArray[numpy.uint8], words: Words) -> None:
    advance = 4 * PIXELS
    width = advance * len(words.text)
    x, y = words.at
    x -= {"start": 0, "middle": width / 2, "end": width}[words.anchor]
    for letter in words.text.upper():
        for row, bits in enumerate(GLYPHS.get(letter, GLYPHS["-"])):
            for column in range(3):
                if int(bits) >> (2 - column) & 1:
                    left, top = round(x) + column * PIXELS, round(y) + (row - 5) * PIXELS
                    pixels[max(0, top) : top + PIXELS, max(0, left) : left + PIXELS] = 40
        x += advance


def _png(pixels: NDArray[numpy.uint8]) -> bytes:
    """RGB, 8 bits, no filter (PNG, ISO/IEC 15948)."""
    height, width, _ = pixels.shape
    rows = numpy.concatenate(
        [numpy.zeros((height, 1), numpy.uint8), pixels.reshape(height, -1)], axis=1
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    out = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        out += struct.pack(">I", len(data)) + kind + data
        out += struct.pack(">I", zlib.crc32(kind + data))
    return out
