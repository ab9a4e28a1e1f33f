"""What ``pagemill quality`` shows: verdicts, tasks, controls."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagemill.bench.quality.bars import bars_of
from pagemill.bench.quality.measure import Measured
from pagemill.bench.quality.results import Results, Row
from pagemill.core.errors import ConfigError
from pagemill.core.units import format_bytes

RULES = (
    "KL: mean nats between the next-token distributions of fp32 KV and of the format, over answer"
    " tokens, the right answer given. <: upper ends of 95 % intervals, which the bars bound."
    " flips: answer tokens with another best one. kept: of the answers that fp32 KV gets right."
    " Flips and kept count questions whose every token is clear (margin > 0.2)."
    " text: continuation of unseen text."
)
COLOURS = {"pass": "green", "fail": "red", "undecided": "yellow"}


def print_results(measured: Measured, found: Results, console: Console) -> None:
    console.print(_verdicts(measured, found.totals))
    for row in found.totals:
        if row.verdict.why:
            console.print(f"{row.kv_format} {row.mode}: {row.verdict.word}, {row.verdict.why}.")
    console.print(_tasks(found))
    if found.left_out:
        names = ", ".join(f"{task} at {length:,}" for task, length in found.left_out)
        console.print(
            f"Not in the verdict, the model gets under 80 % of the tokens right: {names}."
        )
    damaged = ", ".join(f"{name} {verdict.word}" for name, verdict in found.poisoned.items())
    console.print(
        f"Controls: fp32 against itself KL {found.self_kl:g}; damaged blocks: {damaged or '-'};"
        f" bytes read = context tokens x layers x format bytes ({_read(found)})."
    )
    console.print(RULES, style="dim")


def _verdicts(measured: Measured, totals: Sequence[Row]) -> Table:
    """Two lines a format and mode: what was found, and the bars."""
    table = Table(title=f"{measured.model}: KV formats against fp32 KV")
    columns = ("format", "mode", "verdict", "KL", "KL <", "p99 <", "flips % <", "text KL <", "kept",
               "exact %", "text ppl", "tokens")  # fmt: skip
    for column in columns:
        left = column in ("format", "mode", "verdict")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in totals:
        f, text, colour = row.found, row.text, COLOURS[row.verdict.word]
        table.add_row(
            row.kv_format,
            row.mode,
            f"[{colour}]{row.verdict.word}[/]",
            _short(f.kl.value),
            _short(f.kl.high),
            _short(f.kl_p99.high),
            _short(100 * f.flips.high),
            _short(text.kl.high) if text else "-",
            _kept(row),
            f"{100 * f.exact:.0f} of {100 * f.reference_exact:.0f}",
            f"{text.ppl:.1f} {text.ppl / text.reference_ppl - 1:+.1%}" if text else "-",
            f"{f.num_tokens:,}",
        )
        bars = bars_of(row.kv_format, row.mode)
        limits = (bars.kl, bars.kl_p99, 100 * bars.flips, bars.text_kl)
        words = ("", "", "bar", "", *(f"{limit:g}" for limit in limits))
        table.add_row(*words, style="dim", end_section=True)
    return table


def _tasks(found: Results) -> Table:
    """A line a task and length; a column a format and mode: KL and the share of answers kept."""
    table = Table(title="KL in thousandths, answers kept")
    names = [f"{row.kv_format} {row.mode}" for row in found.totals]
    for column in ("task", "length", "tokens", "right %", *names):
        table.add_column(column, justify="left" if column == "task" else "right", no_wrap=True)
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in found.rows:
        cells.setdefault((row.task, row.length), []).append(row)
    for (task, length), rows in cells.items():
        first = rows[0].found
        table.add_row(
            task,
            f"{length:,}",
            f"{first.num_tokens:,}",
            f"{100 * first.reference_accuracy:.0f}",
            *(f"{1000 * row.found.kl.value:.2f}  {_kept(row)}" for row in rows),
        )
    return table


def _read(found: Results) -> str:
    return ", ".join(
        f"{row.kv_format} {row.mode} {format_bytes(row.found.context_bytes)}"
        for row in found.totals
    )


def _kept(row: Row) -> str:
    number = row.found.num_recoverable
    return f"{round(row.found.recovery.value * number)}/{number}" if number else "-"


def _short(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.5f}" if value < 0.01 else f"{value:.3g}"


def write_json(content: dict[str, Any], path: Path) -> None:
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
