"""The report of ``pagemill explain``: a table and findings for a person, JSON for a program."""

from typing import Any

from pagemill.bench.explain import Finding, Group, Report
from pagemill.bench.explain_cause import IS_FAULT


def as_json(report: Report) -> dict[str, Any]:
    """Tokens are counts; rates lie between 0 and 1; ``lost_tokens_per_minute`` may be null."""
    return {
        "by": report.by,
        "tokens": report.note,
        "minutes": report.minutes,
        "num_broken": report.num_broken,
        "broken": list(report.broken),
        "total": _group(report, report.total),
        "groups": [_group(report, group) for group in report.groups],
    }


def _group(report: Report, group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "num_requests": group.num_requests,
        "prompt_tokens": group.prompt_tokens,
        "hit_tokens": group.hit_tokens,
        "hit_rate": group.hit_rate,
        "new_tokens": group.new_tokens,
        "lost_tokens": group.lost_tokens,
        "lost_tokens_per_minute": report.per_minute(group.lost_tokens),
        "findings": [_finding(report, finding) for finding in group.sorted_findings()],
    }


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    cause = finding.example
    return {
        "kind": cause.kind,
        "is_fault": IS_FAULT[cause.kind],
        "what": cause.what,
        "advice": cause.advice,
        "num_requests": finding.num_requests,
        "lost_tokens": finding.lost_tokens,
        "lost_tokens_per_minute": report.per_minute(finding.lost_tokens),
        "message": cause.message,
        "token": cause.token,
        "token_text": cause.token_text,
        "before": cause.before,
        "was": cause.was,
        "now": cause.now,
        "also": cause.also or None,
        "where": finding.where,
        "earlier": finding.earlier_where,
    }


def print_report(report: Report, console: Any, num_groups: int) -> None:
    """Groups by what they lose, then the findings of each. ``console`` is rich's."""
    from rich.table import Table

    console.print(f"tokens: {report.note}", style="dim", markup=False, soft_wrap=True)
    cost = "lost/min" if report.minutes else "lost/request"
    table = Table(report.by, "requests", "tokens", "hit", "new", "lost", cost)
    for column in table.columns[1:]:
        column.justify = "right"
    shown = report.groups[:num_groups]
    for group in (*shown, report.total):
        table.add_row(*_row(report, group), end_section=group is shown[-1] if shown else False)
    console.print(table)
    left = len(report.groups) - len(shown)
    if left > 0:
        console.print(f"{left} more with fewer lost tokens: --top N, or --json FILE for all")
    for group in shown:
        faults = [f for f in group.sorted_findings() if IS_FAULT[f.example.kind]]
        for finding in faults:
            _print_finding(report, group, finding, console)
    if not report.total.lost_tokens:
        console.print("No fault was found: what missed was new text.")
    if report.num_broken:
        nouns = "record was" if report.num_broken == 1 else "records were"
        console.print(f"\n{report.num_broken:,} {nouns} left out as unreadable:")
        left = report.num_broken - len(report.broken)
        more = [f"and {left:,} more"] if left else []
        for line in (*report.broken, *more):
            console.print(f"  {_plain(line)}", markup=False, soft_wrap=True)


def _row(report: Report, group: Group) -> tuple[str, ...]:
    from rich.markup import escape

    per_minute = report.per_minute(group.lost_tokens)
    cost = group.lost_tokens / group.num_requests if per_minute is None else per_minute
    counts = group.num_requests, group.prompt_tokens
    return (
        escape(group.name),
        *(f"{count:,}" for count in counts),
        f"{group.hit_rate:.1%}",
        f"{group.new_tokens:,}",
        f"{group.lost_tokens:,}",
        f"{cost:,.0f}",
    )


def _print_finding(report: Report, group: Group, finding: Finding, console: Any) -> None:
    from rich.text import Text

    cause = finding.example
    per_minute = report.per_minute(finding.lost_tokens)
    price = f"{finding.lost_tokens:,} tokens in {finding.num_requests:,} requests"
    price += f", {per_minute:,.0f} tokens a minute" if per_minute is not None else ""
    place = f"token {cause.token}" + (
        f", message {cause.message}" if cause.message is not None else ""
    )
    lead = _plain(cause.before)
    seen = Text(f"  text    …{lead}") + Text(_plain(cause.token_text), "bold reverse")
    lines = (
        Text(f"\n{group.name}: {cause.what} at {place}", "bold"),
        Text(f"  costs   {price}"),
        seen + Text(_plain(cause.now.removeprefix(cause.token_text))),
        Text(f"  before  …{lead}{_plain(cause.was)}"),
        Text(f"  change  {cause.advice}"),
        Text(f"  seen    {finding.where}, compared with {finding.earlier_where}", "dim"),
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    if cause.also:
        console.print(f"  also    {cause.also}, further behind", markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """One line, with the signs that would break it written out."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in shown)
