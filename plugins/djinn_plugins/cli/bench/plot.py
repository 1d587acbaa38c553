"""Prints the results, with plots made of characters."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from djinn_plugins.cli.bench.report import BenchReport, Comparison

__all__ = ("bar", "histogram", "print_report")

PIPED_WIDTH = 100
"""Columns if the output is not a terminal."""
BAR = 32
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"


def print_report(report: BenchReport) -> None:
    """Print the results to standard output."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    latency = report.latency
    console.print(f"[bold]{escape(report.address or 'this process')}[/] computes on {escape(report.device)}\n")
    console.print(f"[bold]Latency[/]     {_time(latency.median_s)}, 90% below {_time(latency.p90_s)}, {latency.count} "
                  "round trips")
    plot, least_s, most_s = histogram(latency.samples_s, 40)
    console.print(f"            {_time(least_s)} [cyan]{plot}[/] {_time(most_s)}\n")
    console.print("[bold]Throughput[/]")
    fastest = max(max(each.up_bytes_per_s, each.down_bytes_per_s) for each in report.throughput)
    for each in report.throughput:
        for word, rate, colour in (("up", each.up_bytes_per_s, "green"), ("down", each.down_bytes_per_s, "magenta")):
            size = _size(each.size_bytes) if word == "up" else ""
            console.print(f"  {size:>8} {word:>5} [{colour}]{bar(rate / fastest, BAR)}[/] {rate / 1e6:>9,.1f} MB/s")
    console.print()
    for title, unit, compared in (("Operations", "operations/s", report.operations),
                                  ("Small GPT", "tokens/s", report.tokens)):
        _print_comparison(console, title, unit, compared)
    console.print("The tokens are the same." if report.same_tokens else
                  "The tokens differ, as they may where devices round differently.")


def _print_comparison(console: Console, title: str, unit: str, compared: Comparison) -> None:
    most = max(compared.remote_per_s, compared.local_per_s)
    console.print(f"[bold]{title}[/]  {compared.factor:.2f} times the rate of PyTorch on this machine's CPU")
    for word, rate, colour in (("djinn", compared.remote_per_s, "green"), ("here", compared.local_per_s, "blue")):
        console.print(f"  {word:>14} [{colour}]{bar(rate / most, BAR)}[/] {rate:>9,.0f} {unit}")
    console.print()


def bar(part: float, width: int) -> str:
    """Draw a bar of a part of the width, in eighths of a character."""
    eighths = max(0, min(8 * width, round(part * 8 * width)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def histogram(samples: Sequence[float], width: int) -> tuple[str, float, float]:
    """Draw how often which value occurs, on a logarithmic scale of values.

    Returns:
        The drawing, and the values at its ends.
    """
    least, most = min(samples), max(samples)
    span = math.log(most / least) or 1.0
    counts = [0] * width
    for sample in samples:
        counts[min(width - 1, int(math.log(sample / least) / span * width))] += 1
    # A value that occurs at all is visible.
    heights = [math.ceil(8 * count / max(counts)) for count in counts]
    return "".join(_HEIGHTS[height] for height in heights), least, most


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"
