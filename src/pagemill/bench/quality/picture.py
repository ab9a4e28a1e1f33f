"""A picture of a run: accuracy and KL by depth, a column a length, a line a format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagemill.bench.picture import check_picture
from pagemill.bench.quality.results import NUM_DEPTHS, DepthRow
from pagemill.core.errors import ConfigError

SMALLEST_KL = 1e-7
"""A KL of 0 has no place on a logarithmic axis."""


def write_picture(rows: Sequence[DepthRow], model: str, path: Path) -> None:
    """SVG, PNG or PDF. ConfigError for another ending, or where matplotlib is missing."""
    check_picture(path)
    from matplotlib.figure import Figure

    lengths = sorted({row.length for row in rows})
    figure = Figure(figsize=(max(7.5, 2 + 3.4 * len(lengths)), 6.4), layout="constrained")
    figure.suptitle(f"{model}: answers by the depth at which they stand", fontsize="medium")
    panels = figure.subplots(2, len(lengths), squeeze=False, sharex=True, sharey="row")
    for column, length in enumerate(lengths):
        own = [row for row in rows if row.length == length]
        _draw(panels[0, column], panels[1, column], own)
        panels[0, column].set_title(f"{length:,} tokens")
    panels[0, 0].set_ylabel("answer tokens right, %")
    panels[0, 0].set_ylim(top=101)
    panels[1, 0].set_ylabel("mean KL, nats")
    panels[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _draw(accuracy: Any, kl: Any, rows: Sequence[DepthRow]) -> None:
    reference = sorted({(_middle(row), 100 * row.reference_accuracy) for row in rows})
    accuracy.plot(*zip(*reference, strict=True), color="0.4", linestyle="--", label="fp32 KV")
    for name in dict.fromkeys((row.kv_format, row.mode) for row in rows):
        own = [row for row in rows if (row.kv_format, row.mode) == name]
        depths = [_middle(row) for row in own]
        label, style = " ".join(name), {"marker": "o", "markersize": 4, "linewidth": 1.2}
        accuracy.plot(depths, [100 * row.accuracy for row in own], label=label, **style)
        kl.plot(depths, [max(row.kl, SMALLEST_KL) for row in own], **style)
    kl.set_yscale("log")
    kl.set_xlabel("depth in the context, %")
    for panel in (accuracy, kl):
        panel.set_xlim(0, 100)
        panel.grid(alpha=0.3)


def _middle(row: DepthRow) -> float:
    return 100 * (row.depth + 0.5) / NUM_DEPTHS
