"""The ``pagemill`` command: picks a subcommand and prints errors as one clear line."""

import argparse
import sys
from collections.abc import Sequence

from pagemill.cli import doctor, explain, pull, replay, serve
from pagemill.core.errors import PagemillError

COMMANDS = (serve, replay, explain, pull, doctor)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagemill",
        description="A KV-cache manager for large language models: paged, shared, measured.",
        epilog="Start here:  pagemill pull smollm2-135m  and then  pagemill serve smollm2-135m",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0 is success, 1 a problem that the message explains, 2 a wrong flag."""
    parsed = make_parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except PagemillError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
