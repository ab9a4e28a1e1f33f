"""``pagemill replay``: a trace through the cache alone, every index, policy and size."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagemill.bench.allocator import ALLOCATORS, compare
from pagemill.bench.picture import check_picture, write_picture
from pagemill.bench.replay import DEFAULT_SIZES, INDEXES, Cell, choose, evictions, sweep
from pagemill.bench.replay_report import describe, print_allocators, print_cells, write_json
from pagemill.bench.trace_formats.request import ReadOptions
from pagemill.bench.traces import Trace, check_block_size, load_trace, spread
from pagemill.bench.waste import waste_by_size
from pagemill.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="replay a trace through the cache: hit rates beside what is possible",
        description="Replay a trace through the cache, without a model: hit rate and saved prefill"
        " work of every prefix index and eviction policy at many sizes, beside a clairvoyant.",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="Mooncake or Qwen-Bailian JSON lines, Claude Code sessions, a log of prompts, or Azure"
        " CSV (lengths only); plain, .gz or .xz",
    )
    known = ",".join(INDEXES)
    parser.add_argument("--prefix-index", default="radix", metavar="LIST", help=f"of {known}; all")
    parser.add_argument("--eviction", default="all", metavar="LIST", help="policies, or all")
    parser.add_argument(
        "--num-blocks",
        default=",".join(DEFAULT_SIZES),
        metavar="LIST",
        help="percent of the trace's unique blocks, or blocks (%(default)s)".replace("1%,", "1%%,"),
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens; default: the trace's")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="for logs of text; default: a byte a token"
    )
    parser.add_argument(
        "--spread-hours",
        type=float,
        default=12.0,
        metavar="H",
        help="Claude Code sessions start uniformly in so many hours (12)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of those starts (0)")
    parser.add_argument(
        "--allocator", metavar="LIST", help=f"compare {' and '.join(ALLOCATORS)} instead"
    )
    parser.add_argument("--no-bound", action="store_true", help="leave the clairvoyant out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the hit rates: .svg, .png or .pdf"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    from pagemill.bench.console import report_console

    console = report_console()
    if parsed.picture:
        check_picture(parsed.picture)
    options = ReadOptions(start_s=spread(parsed.spread_hours, parsed.seed))
    if parsed.tokenizer:
        options = replace(options, tokenize=_tokenizer(parsed.tokenizer))
    check_block_size(parsed.block_size)
    for path in (parsed.json, parsed.picture):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if parsed.allocator:
        trace = load_trace(parsed.trace, options=options)
        names = choose(parsed.allocator.replace("|", ","), ALLOCATORS, "allocator")
        rows = compare(trace, names, parsed.block_size or 16)
        print_allocators(rows, console)
        if parsed.json:
            write_json(rows, parsed.json, trace=trace.name)
        return 0
    trace = load_trace(parsed.trace, block_size=parsed.block_size, options=options)
    if trace.block_tokens == 0:
        raise ConfigError(f"{parsed.trace} has lengths only: use --allocator contiguous,paged")
    cells = _sweep(parsed, trace)
    waste = waste_by_size(trace) if trace.is_exact or parsed.block_size is None else {}
    print_cells(cells, waste, console)
    if trace.num_empty:
        console.print(f"Left out: {trace.num_empty} request(s) of no tokens.")
    if parsed.json:
        write_json(cells, parsed.json, **describe(trace), waste_tokens_per_request=waste)
    if parsed.picture:
        write_picture(cells, parsed.picture)
    return 0


def _sweep(parsed: argparse.Namespace, trace: Trace) -> list[Cell]:
    from rich.console import Console
    from rich.progress import Progress

    error = Console(stderr=True)
    indexes = choose(parsed.prefix_index, INDEXES, "prefix index")
    with Progress(console=error, transient=True, disable=not error.is_terminal) as bar:
        task = bar.add_task(f"replaying {trace.name}", total=None)
        return sweep(
            trace,
            indexes,
            evictions(parsed.eviction),
            parsed.num_blocks,
            with_bound=not parsed.no_bound,
            on_cell=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _tokenizer(name: str) -> Callable[[str], Sequence[int]]:
    from pagemill.models.gguf import GgufFile
    from pagemill.models.gguf_tokenizer import from_gguf
    from pagemill.models.home import find_model
    from pagemill.models.tokenizer import from_folder

    path = find_model(name)
    tokens = from_folder(path, {}) if path.is_dir() else from_gguf(GgufFile(path).metadata)
    return tokens.encode
