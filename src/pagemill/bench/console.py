"""Where a report is printed: a terminal as wide as it is, anything else wide enough for tables."""

from rich.console import Console

PIPE_COLUMNS = 1000


def report_console() -> Console:
    """Of standard output. A table in a pipe or a file is never cut."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
