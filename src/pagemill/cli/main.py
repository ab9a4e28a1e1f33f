"""The ``pagemill`` command: picks a subcommand and prints errors as one clear line."""

import argparse
import sys
from collections.abc import Sequence

from pagemill.cli import doctor, explain, pull, quality, replay, serve
from pagemill.cli.many import one_value_each
from pagemill.cli.options import MANY_FLAGS
from pagemill.core.errors import PagemillError

COMMANDS = (serve, quality, replay, explain, pull, doctor)


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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What the words after ``pagemill`` ask for. Ends the process with 2 where a flag is wrong."""
    return make_parser().parse_args(one_value_each(list(arguments), MANY_FLAGS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0 is success, 1 a problem that the message explains, 2 a wrong flag."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
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
