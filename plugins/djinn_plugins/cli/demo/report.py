"""The comparisons and their cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

import djinn

T = TypeVar("T")
COUNTERS = ("operations", "programs_sent", "round_trips", "bytes_sent", "bytes_received")


@attrs.frozen
class DemoRow:
    """One piece of work, done locally and remotely."""

    name: str
    local_s: float
    remote_s: float
    counters: dict[str, int]


@attrs.define
class DemoReport:
    """Collects results.

    Attributes:
        exact: Whether local and remote work run on the same type of device, so that every bit must be equal.
    """

    exact: bool
    rows: list[DemoRow] = attrs.field(factory=list)
    differences: list[str] = attrs.field(factory=list)

    @property
    def all_equal(self) -> bool:
        """Whether there were no differences."""
        return not self.differences

    def compare(self, name: str, local: Callable[[], T], remote: Callable[[], T]) -> tuple[T, T]:
        """Do a piece of work locally and remotely, and record the time and the bytes sent."""
        begin = time.perf_counter()
        expected = local()
        middle = time.perf_counter()
        djinn.reset_stats()
        result = remote()
        djinn.synchronize()
        end = time.perf_counter()
        stats = djinn.stats()
        self.rows.append(DemoRow(name, middle - begin, end - middle, {name: stats[name] for name in COUNTERS}))
        return expected, result

    def check(self, what: str, equal: bool, detail: str = "") -> str:
        """Record whether results are equal, and return a text that says so."""
        if not equal:
            self.differences.append(what)
        word = "[green]equal[/green]" if equal else "[red]DIFFERENT[/red]"
        return f"{what}: {word}{f' ({detail})' if detail else ''}"

    def print(self, console: Console) -> None:
        """Print the closing table."""
        table = Table(title="What it took", box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2,
                      title_justify="left")
        for heading in ("work", "recorded", "programs", "trips", "sent", "received", "remote", "local"):
            table.add_column(heading, justify="left" if heading == "work" else "right", no_wrap=True)
        for row in self.rows:
            counters: dict[str, Any] = row.counters
            table.add_row(row.name, f"{counters['operations']:,}", str(counters["programs_sent"]),
                          str(counters["round_trips"]), size(counters["bytes_sent"]), size(counters["bytes_received"]),
                          f"{row.remote_s:.2f} s", f"{row.local_s:.2f} s")
        console.print(table)
        if self.all_equal:
            console.print("[green]Everything equals local eager.[/green]")
        else:
            console.print(f"[red]Different from local eager: {', '.join(self.differences)}.[/red]")


def size(count: int) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000  # type: ignore[assignment]  # a float from here on
    return f"{count:.1f} GB"
