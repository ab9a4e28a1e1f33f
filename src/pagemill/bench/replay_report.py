"""What ``pagemill replay`` shows: tables for a person, rows for a program."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagemill.bench.allocator import AllocatorRow
from pagemill.bench.replay import Cell
from pagemill.bench.traces import Trace
from pagemill.core.errors import ConfigError

RULES = (
    "The first 10 % of requests warm the cache up and are not counted. Requests run one after"
    " another, equal times in the order of the file, and are over at once: only the running"
    " request's blocks are held. Prompt blocks only. hit %: hit tokens of prompt tokens, beside a"
    " clairvoyant's. work %: saved prefill work, attention included, beside an upper bound."
    " us: processor time a request."
)


def print_cells(cells: Sequence[Cell], waste: dict[int, float], console: Console) -> None:
    table = Table(title=f"{cells[0].trace}, blocks of {cells[0].block_size} tokens")
    for column in ("index", "eviction", "blocks", "hit %", "bound", "work %", "bound", "us"):
        left = column in ("index", "eviction")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.prefix_index,
            cell.eviction if cell.prefix_index != "off" else "-",
            f"{cell.num_blocks:,}",
            _percent(cell.hit_rate),
            _percent(cell.bound),
            _percent(cell.saved_work),
            _percent(cell.bound_work),
            f"{cell.cpu_us_per_request:.1f}",
        )
    console.print(table)
    refused = max(cell.num_refused for cell in cells)
    if refused:
        console.print(f"Up to {refused} requests were larger than the cache and hit nothing.")
    lost = ", ".join(f"{size}: {tokens:.1f}" for size, tokens in waste.items())
    if lost:
        console.print(f"Tokens lost to block borders a request, by block size: {lost}.")
    console.print(RULES, style="dim")


def print_allocators(rows: Sequence[AllocatorRow], console: Console) -> None:
    table = Table(title=f"{rows[0].trace}: {rows[0].num_requests:,} requests, prompt and output")
    fit = f"fit {_millions(rows[0].memory_tokens)}"
    for column in ("allocator", "piece", "reserved", "used", "waste %", "> 256", "others", fit):
        left = column == "allocator"
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.allocator,
            f"{row.block_size:,}",
            _millions(row.reserved_tokens),
            _millions(row.used_tokens),
            _percent(row.waste),
            _percent(row.waste_long),
            _percent(row.waste_short),
            f"{row.num_fit:,}",
        )
    console.print(table)
    console.print("> 256 and others: waste by prompt tokens. fit: requests at a time.", style="dim")
    for row in rows:
        if row.allocator == "paged" and row.waste_short is not None and row.waste_short >= 0.04:
            console.print(
                f"Paged waste is {row.waste_short:.1%} for the {row.num_short:,} requests with at"
                f" most 256 prompt tokens: the last block of a short sequence is much of it."
            )


def write_json(rows: Sequence[Cell | AllocatorRow], path: Path, **more: Any) -> None:
    content = {"rows": [row.row() for row in rows], **more}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def describe(trace: Trace) -> dict[str, Any]:
    """The trace and the rules, for the JSON."""
    return {
        "trace": trace.name,
        "num_requests": trace.num_requests,
        "num_empty": trace.num_empty,
        "prompt_tokens": int(trace.prompt_tokens.sum()),
        "block_size": trace.block_tokens,
        "is_exact": trace.is_exact,
        "rules": RULES,
    }


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.2f} M"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
