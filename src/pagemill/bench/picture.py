"""A picture of a sweep: hit rate over cache size, a line a policy, a panel an index."""

import math
from collections.abc import Sequence
from pathlib import Path

from pagemill.bench.drawing import Line, Point, Sheet, Words, write_sheet
from pagemill.bench.replay import Cell

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 60, 170, 40, 50
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
BOUND_COLOUR, GRID_COLOUR = "#888888", "#dddddd"


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """To a .svg or .png. ConfigError for another ending."""
    indexes = list(dict.fromkeys(cell.prefix_index for cell in cells if cell.prefix_index != "off"))
    sheet = Sheet(WIDTH, max(1, len(indexes)) * HEIGHT)
    for row, index in enumerate(indexes):
        _panel(sheet, [cell for cell in cells if cell.prefix_index == index], row * HEIGHT)
    write_sheet(sheet, path)


def _panel(sheet: Sheet, cells: Sequence[Cell], top: int) -> None:
    counts = sorted({cell.num_blocks for cell in cells})
    low, high = math.log(counts[0]), math.log(counts[-1])
    most = max(max(cell.hit_rate, cell.bound or 0) for cell in cells)
    most = math.ceil(most * 10) / 10 or 1.0

    def place(count: int, rate: float) -> Point:
        share = (math.log(count) - low) / (high - low) if high > low else 0.5
        y = HEIGHT - BOTTOM - rate / most * (HEIGHT - TOP - BOTTOM)
        return LEFT + share * (WIDTH - LEFT - RIGHT), top + y

    first = cells[0]
    title = f"{first.trace}, {first.prefix_index} index, {first.block_size} tokens: hit rate"
    sheet.parts.append(Words((LEFT, top + 22), title))
    for step in range(0, 11, 2):
        rate = most * step / 10
        y = place(counts[0], rate)[1]
        sheet.parts.append(Line([(LEFT, y), (WIDTH - RIGHT, y)], GRID_COLOUR))
        sheet.parts.append(Words((LEFT - 8, y + 4), f"{rate:.0%}", "end"))
    for count in counts:
        x, y = place(count, 0)
        sheet.parts.append(Words((x, y + 18), f"{count:,}", "middle"))
    sheet.parts.append(Words((LEFT, top + HEIGHT - 12), "blocks"))
    names = list(dict.fromkeys(cell.eviction for cell in cells))
    for number, name in enumerate(names):
        rates = sorted((c.num_blocks, c.hit_rate) for c in cells if c.eviction == name)
        points = [place(*at) for at in rates]
        _named_line(sheet, name, points, COLOURS[number % len(COLOURS)], top + 18 * number)
    bounds = sorted({(c.num_blocks, c.bound) for c in cells if c.bound is not None})
    if bounds:
        points = [place(*at) for at in bounds]
        _named_line(sheet, "bound", points, BOUND_COLOUR, top + 18 * len(names))


def _named_line(sheet: Sheet, name: str, points: list[Point], colour: str, y: float) -> None:
    sheet.parts.append(Line(points, colour, 2, has_dots=True))
    x = WIDTH - RIGHT + 16
    sheet.parts.append(Line([(x, TOP + y), (x + 18, TOP + y)], colour, 3))
    sheet.parts.append(Words((x + 24, TOP + y + 4), name))
