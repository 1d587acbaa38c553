"""Shows the checks of ``djinn doctor``: in groups, with colours on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinn_plugins.cli.doctor import CheckResult

__all__ = ("lines_of", "print_checks")

_WIDTH = 26
"""Columns of the names."""


def lines_of(checks: Sequence[CheckResult]) -> list[str]:
    """Return the text for files and pipes: a group is a paragraph, a remedy a line of its own below its finding."""
    lines: list[str] = []
    for group, members in groupby(checks, lambda check: check.group):
        lines += ["", group] if lines else [group]
        for check in members:
            lines.append(f"  {_word(check):7}  {check.name:{_WIDTH}}  {_one_line(check.found)}")
            if check.remedy:
                lines.append(f"  {'':7}  {'':{_WIDTH}}  -> {_one_line(check.remedy)}")
    return [*lines, "", verdict_of(checks)]


def print_checks(checks: Sequence[CheckResult]) -> None:
    """Print the checks on a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for group, members in groupby(checks, lambda check: check.group):
        console.print(f"\n[bold]{escape(group)}[/]")
        table = Table.grid(padding=(0, 2))
        table.add_column(width=1)
        table.add_column(width=_WIDTH)
        table.add_column()
        for check in members:
            mark = "[bold red]✗[/]" if not check.ok else "[yellow]![/]" if check.remedy else "[green]✓[/]"
            table.add_row(mark, escape(check.name), escape(_one_line(check.found)))
            if check.remedy:
                hint = "yellow" if check.ok else "red"
                table.add_row("", "", f"[{hint}]→ {escape(_one_line(check.remedy))}[/]")
        console.print(table)
    healthy = all(check.ok for check in checks)
    console.print(f"\n[{'green' if healthy else 'bold red'}]{escape(verdict_of(checks))}[/]")


def verdict_of(checks: Sequence[CheckResult]) -> str:
    """Summarize the checks in one sentence."""
    problems = [check.name for check in checks if not check.ok]
    if not problems:
        return "Everything that a session needs is here."
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count}: {', '.join(problems)}. The arrows say what to do."


def _word(check: CheckResult) -> str:
    return "ok" if check.ok else "problem"


def _one_line(text: str) -> str:
    return " ".join(text.split())
