"""Where progress is shown: a line on a terminal, or a bar in a notebook."""

from __future__ import annotations

import html
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from djinn_plugins.watch.progress.phases import Phase

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ("Notebook", "Screen", "Terminal", "page_of", "screen_here", "words_of")

_HTML = ('<div style="font-family: monospace">{words}<br>'
         '<progress style="width: 24em" max="100"{value}></progress></div>')


class Screen(Protocol):
    """Shows one phase at a time.

    Concurrency:
        One thread at a time.
    """

    def show(self, where: str, phase: Phase) -> None:
        """Show a phase in place of the last one.

        Args:
            where: Address of the server; for a phase ``connecting``, the reason of the wait.
            phase: The phase.
        """

    def hide(self) -> None:
        """Remove the phase that is shown."""


def screen_here() -> Screen | None:
    """Return where this process shows progress; ``None`` without a terminal or a notebook."""
    if _is_notebook():
        return Notebook()
    if sys.stderr is not None and sys.stderr.isatty():
        return Terminal()
    return None


def _is_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return hasattr(running, "kernel")


def words_of(where: str, phase: Phase) -> str:
    """Describe a phase in words."""
    if phase.kind == "connecting":
        return f"djinn: {where}, {_time(phase.lasts_s)}"
    if phase.kind == "waiting":
        return f"djinn: waiting for {where}, {_time(phase.lasts_s)}"
    amount = f"djinn: {phase.kind} {phase.done_bytes / 1e6:,.1f} of {phase.total_bytes / 1e6:,.1f} MB"
    if phase.left_s is None:
        return amount
    return f"{amount}, {phase.bytes_per_s / 1e6:,.1f} MB/s, {_time(phase.left_s)} left"


def _time(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"


class Terminal:
    """A line on standard error, with a bar; see `Screen`."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def show(self, where: str, phase: Phase) -> None:
        """Show a phase."""
        if self._progress is None:
            self._progress = _bar()
            self._progress.add_task("", total=None)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, description=words_of(where, phase), total=phase.total_bytes or None,
                              completed=phase.done_bytes)
        self._progress.refresh()

    def hide(self) -> None:
        """Remove the line."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), transient=True,
                    auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
                    console=Console(stderr=True, soft_wrap=False))


class Notebook:
    """A bar below the cell; see `Screen`. It is plain HTML, so that no widget has to be installed."""

    def __init__(self) -> None:
        # Of the user's environment; djinn does not need it.
        self._ipython: Any = import_module("IPython.display")
        self._shown: Any = None

    def show(self, where: str, phase: Phase) -> None:
        """Show a phase."""
        page = self._ipython.HTML(page_of(where, phase))
        if self._shown is None:
            self._shown = self._ipython.display(page, display_id=True)
        else:
            self._shown.update(page)

    def hide(self) -> None:
        """Empty the bar's place."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.update(self._ipython.HTML(""))


def page_of(where: str, phase: Phase) -> str:
    """Return the HTML of a phase."""
    value = f' value="{100 * phase.done_bytes / phase.total_bytes:.0f}"' if phase.total_bytes else ""
    return _HTML.format(words=html.escape(words_of(where, phase)), value=value)
