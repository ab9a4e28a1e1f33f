"""``pagemill quality``: which KV formats are safe for a model on long contexts."""

import argparse
import re
from pathlib import Path
from typing import Any

from pagemill.bench.quality.measure import (
    DEFAULT_LENGTHS,
    FORMATS,
    MODES,
    QUICK_CONTEXTS,
    QUICK_LENGTHS,
    REFERENCE,
    Measured,
    QualityConfig,
    measure,
)
from pagemill.bench.quality.tasks import KINDS
from pagemill.core.errors import ConfigError

DEFAULT_FORMATS = tuple(name for name in FORMATS if name != REFERENCE)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quality",
        help="which KV formats are safe for a model on long contexts",
        description="Score every KV format through the cache against fp32 KV: retrieval, lists,"
        " codes, copying, variables, unseen text and turns, at several lengths and depths."
        " Exit code 1 where a format fails its bar.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a short name")
    formats = ",".join(DEFAULT_FORMATS)
    parser.add_argument("--formats", default=formats, metavar="LIST", help="(%(default)s)")
    parser.add_argument(
        "--lengths",
        metavar="LIST",
        help="tokens of a context with its longest question (1k,2k,4k; those the model can hold)",
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), metavar="LIST", help="of contexts (%(default)s)"
    )
    parser.add_argument(
        "--contexts", type=int, metavar="N", help="of each kind at each length (2; 2 if --quick)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of texts and draws (0)")
    parser.add_argument(
        "--mode",
        choices=(*MODES, "both"),
        default="cascade",
        help="cascade: the context is computed by a cache that reads its own format, as the engine"
        " does; store: computed exactly, then coded (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="1k alone, 2 contexts of each kind: minutes"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights, in the reference too (float32)",
    )
    parser.add_argument(
        "--chunk", type=int, default=512, metavar="N", help="tokens of a prefill step (%(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="to compute on; default: torch's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="accuracy and KL by depth: .svg, .png or .pdf"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    from pagemill.bench.console import report_console
    from pagemill.bench.picture import check_picture
    from pagemill.bench.quality.picture import write_picture
    from pagemill.bench.quality.report import print_results, write_json
    from pagemill.bench.quality.results import as_json, results

    if parsed.picture:
        check_picture(parsed.picture)
    for path in (parsed.json, parsed.picture):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    config = _config(parsed)
    measured = _with_progress(config)
    found = results(config, measured)
    print_results(measured, found, report_console())
    if parsed.json:
        write_json(as_json(config, measured, found), parsed.json)
    if parsed.picture:
        write_picture(found.depths, measured.model, parsed.picture)
    return 1 if found.has_failure else 0


def _config(parsed: argparse.Namespace) -> QualityConfig:
    if parsed.threads is not None and not 1 <= parsed.threads <= 4096:
        raise ConfigError(f"--threads {parsed.threads}: give 1 to 4096")
    usual = QUICK_LENGTHS if parsed.quick else DEFAULT_LENGTHS
    number = QUICK_CONTEXTS if parsed.quick else 2
    return QualityConfig(
        model=parsed.model,
        formats=_names(parsed.formats),
        kinds=_names(parsed.kinds),
        lengths=_lengths(parsed.lengths) if parsed.lengths is not None else usual,
        is_exact_length=parsed.lengths is not None,
        modes=MODES if parsed.mode == "both" else (parsed.mode,),
        num_contexts=number if parsed.contexts is None else parsed.contexts,
        seed=parsed.seed,
        dtype=parsed.dtype or "float32",
        chunk_tokens=parsed.chunk,
        num_threads=parsed.threads,
    )


def _names(text: str) -> tuple[str, ...]:
    """``a,b`` as names, each once."""
    return tuple(dict.fromkeys(filter(None, re.split(r"[,\s]+", text))))


def _lengths(text: str) -> tuple[int, ...]:
    """``1k,2048`` in tokens, each once, in order."""
    found = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(k?)\s*", word.lower())
        if not match:
            raise ConfigError(f"--lengths {word[:40]!r}: write tokens, as 2048 or 2k")
        found.add(int(match.group(1)) * (1024 if match.group(2) else 1))
    return tuple(sorted(found))


def _with_progress(config: QualityConfig) -> Measured:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    error = Console(stderr=True)
    with Progress(*columns, console=error, transient=True, disable=not error.is_terminal) as bar:
        task = bar.add_task(f"loading {config.model}", total=None)
        return measure(
            config,
            lambda words, done, total: bar.update(
                task, description=words, completed=done, total=total
            ),
        )
