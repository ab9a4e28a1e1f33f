"""A picture of a sweep: hit rate over cache size, a line a policy, a panel an index."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagemill.bench.replay import Cell
from pagemill.core.errors import ConfigError

ENDINGS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """ConfigError where the picture cannot be drawn: better before a long sweep than after it."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"the picture {path}: its name must end in {', '.join(ENDINGS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install '.[plot]' in the checkout"
        ) from error


def write_picture(cells: Sequence[Cell], path: Path) -> None:
    """One of ENDINGS. ConfigError for another, or where matplotlib is missing."""
    check_picture(path)
    from matplotlib.figure import Figure

    indexes = list(dict.fromkeys(cell.prefix_index for cell in cells if cell.prefix_index != "off"))
    figure = Figure(figsize=(9, 4.8 * max(1, len(indexes))), layout="constrained")
    axes = figure.subplots(max(1, len(indexes)), squeeze=False)[:, 0]
    for index, panel in zip(indexes, axes, strict=False):
        _draw(panel, [cell for cell in cells if cell.prefix_index == index])
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _draw(panel: Any, cells: Sequence[Cell]) -> None:
    first = cells[0]
    for name in dict.fromkeys(cell.eviction for cell in cells):
        rates = sorted((c.num_blocks, 100 * c.hit_rate) for c in cells if c.eviction == name)
        panel.plot(*zip(*rates, strict=True), marker="o", markersize=4, label=name)
    bounds = sorted({(c.num_blocks, 100 * c.bound) for c in cells if c.bound is not None})
    if bounds:
        panel.plot(*zip(*bounds, strict=True), color="0.4", linestyle="--", label="bound")
    counts = sorted({cell.num_blocks for cell in cells})
    if counts[0] > 0 and math.log10(counts[-1] / counts[0]) > 0.5:
        panel.set_xscale("log")
    panel.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    panel.set_xticks([], minor=True)
    panel.set_ylim(bottom=0)
    panel.set(
        title=f"{first.trace}, {first.prefix_index} index, blocks of {first.block_size} tokens",
        xlabel="blocks in the cache",
        ylabel="hit tokens of prompt tokens, %",
    )
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
