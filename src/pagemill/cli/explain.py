"""``pagemill explain``: why prompts miss the cache."""

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.core.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.bench.explain import Report
    from pagemill.bench.explain_read import Broken, LoggedRequest

LIMIT_CROSSED = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say why the prompts of a log miss the cache",
        description="Hit rate per template, tenant or session of a request log; the first differing"
        " token where prompts part, what it costs, and what to change. Works offline.",
        epilog="Exit code: 0, or 3 where --fail-under or --max-lost-tokens is crossed, 1 for an"
        " error, 2 for a wrong flag.",
    )
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="OpenAI request bodies as JSON lines, ShareGPT JSON, or JSON lines with input or"
        " prompt; .gz and .xz too",
    )
    parser.add_argument(
        "--by", default="template", metavar="FIELD", help="template, tenant, session or a log field"
    )
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer and template to use")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja chat template")
    parser.add_argument("--isolate", action="store_true", help="tenants do not share prefixes")
    parser.add_argument(
        "--cache-tokens",
        type=int,
        default=1 << 24,
        metavar="N",
        help="size of the cache (16777216)",
    )
    parser.add_argument(
        "--min-lost", type=int, default=64, metavar="N", help="smallest loss in a request (64)"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="groups to print (20)")
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first record that cannot be read"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    parser.add_argument(
        "--fail-under",
        type=_rate,
        metavar="RATE",
        help="exit 3 under this hit rate, as 0.6 or 60%%",
    )
    parser.add_argument(
        "--max-lost-tokens", type=int, metavar="N", help="exit 3 when more tokens are lost"
    )
    parser.set_defaults(run=run)


def _rate(text: str) -> float:
    try:
        rate = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        rate = math.nan
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: give 0.6 or 60%")
    return rate


def run(parsed: argparse.Namespace) -> int:
    from pagemill.bench.console import report_console
    from pagemill.bench.explain import ExplainConfig, explain
    from pagemill.bench.explain_read import Broken
    from pagemill.bench.explain_report import as_json, print_report
    from pagemill.bench.explain_tokens import load_prompts

    for path in parsed.logs:
        if not path.is_file():
            raise ConfigError(f"there is no log {path}")
    config = ExplainConfig(parsed.by, parsed.isolate, parsed.cache_tokens, max(1, parsed.min_lost))
    prompts = load_prompts(parsed.model, parsed.chat_template)
    broken = Broken(parsed.strict)
    report = explain(_with_progress(parsed.logs, broken), prompts, config, broken)
    print_report(report, report_console(), max(1, parsed.top))
    if parsed.json is not None:
        try:
            parsed.json.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{parsed.json} cannot be written: {error}") from error
    return _code(parsed, report)


def _code(parsed: argparse.Namespace, report: "Report") -> int:
    code, total = 0, report.total
    if parsed.fail_under is not None and total.hit_rate < parsed.fail_under:
        print(f"hit rate {total.hit_rate:.1%} is under {parsed.fail_under:.1%}")
        code = LIMIT_CROSSED
    if parsed.max_lost_tokens is not None and total.lost_tokens > parsed.max_lost_tokens:
        print(f"{total.lost_tokens} tokens are lost, more than {parsed.max_lost_tokens}")
        code = LIMIT_CROSSED
    return code


def _with_progress(logs: list[Path], broken: "Broken") -> "Iterator[LoggedRequest]":
    from rich.console import Console
    from rich.progress import Progress

    from pagemill.bench.explain_read import read_log

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for path in logs:
            task = bar.add_task(path.name, total=path.stat().st_size)
            yield from read_log(path, partial(_show, bar, task), broken)


def _show(bar: Any, task: Any, num_bytes: int) -> None:
    bar.update(task, completed=num_bytes)
