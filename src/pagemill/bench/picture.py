"""A picture of a sweep, as SVG, written by hand: hit rate over cache size, a line a policy."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pagemill.bench.replay import Cell
from pagemill.core.errors import ConfigError

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 60, 170, 40, 50
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
BOUND_COLOUR = "#888888"

Point = tuple[float, float]


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """One panel an index, one under another. ConfigError for another ending than .svg."""
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"the picture {path}: its name must end in .svg")
    indexes = list(dict.fromkeys(cell.prefix_index for cell in cells if cell.prefix_index != "off"))
    panels = [
        _panel([cell for cell in cells if cell.prefix_index == index], row * HEIGHT)
        for row, index in enumerate(indexes)
    ]
    height = max(1, len(indexes)) * HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}"'
        ' fill="white"/>'
    )
    path.write_text(head + "".join(panels) + "</svg>\n", encoding="utf-8")


def _panel(cells: Sequence[Cell], top: int) -> str:
    counts = sorted({cell.num_blocks for cell in cells})
    low, high = math.log(counts[0]), math.log(counts[-1])
    most = max(max(cell.hit_rate, cell.bound or 0) for cell in cells) or 1.0
    most = math.ceil(most * 10) / 10

    def place(count: int, rate: float) -> Point:
        share = (math.log(count) - low) / (high - low) if high > low else 0.5
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - rate / most * (HEIGHT - TOP - BOTTOM)

    title = escape(f"{cells[0].trace}, {cells[0].prefix_index} index, {cells[0].block_size} tokens")
    parts = [f'<g transform="translate(0,{top})"><text x="{LEFT}" y="22">{title}: hit rate</text>']
    for step in range(0, 11, 2):
        (x, y), rate = place(counts[0], most * step / 10), most * step / 10
        parts.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate:.0%}</text>')
    for count in counts:
        x, y = place(count, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{count:,}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">blocks</text>')
    names = list(dict.fromkeys(cell.eviction for cell in cells))
    for number, name in enumerate(names):
        line = [(c.num_blocks, c.hit_rate) for c in cells if c.eviction == name]
        points = [place(*at) for at in sorted(line)]
        parts.append(_line(name, points, COLOURS[number % len(COLOURS)], number))
    bound = sorted({(c.num_blocks, c.bound) for c in cells if c.bound is not None})
    if bound:
        points = [place(count, rate) for count, rate in bound]
        parts.append(_line("bound", points, BOUND_COLOUR, len(names)))
    return "".join(parts) + "</g>"


def _line(name: str, points: Sequence[Point], colour: str, number: int) -> str:
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    x, y = WIDTH - RIGHT + 16, TOP + 18 * number
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
        f'<path d="M{x},{y}h18" stroke="{colour}" stroke-width="3"/>'
        f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>'
    )
