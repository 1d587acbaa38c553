"""Entering a mode for the rest of the process, and reporting at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs

from djinn.errors import PluginError
from djinn.plugins import DEFAULTS, Plugins
from djinn.record import devices
from djinn_plugins.run import leaving
from djinn_plugins.run.kinds import RunContext, RunMode
from djinn_plugins.run.report import RunReport

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("RUN_AS", "STRICT_STATUS", "ActiveRun", "begin", "choose", "leave", "session_ended", "session_started")

RUN_AS = "DJINN_RUN_AS"
"""Variable that names the mode of this process and of those that it starts."""
STRICT_STATUS = 3
"""Exit status of a program that ended well, but not as ``--strict`` wants it."""

_run: ActiveRun | None = None


@attrs.define
class ActiveRun:
    """A mode that was entered for the rest of this process.

    Attributes:
        mode: The mode.
        report: What is reported at the end.
        strict: Whether problems make the run fail.
        is_program: Whether this process was started by ``djinn run``; otherwise it reports only if it used the device.
        status: Exit status of the program, once it is known.
    """

    mode: RunMode
    report: RunReport
    strict: bool = False
    is_program: bool = False
    status: int = 0
    entered: ExitStack = attrs.field(factory=ExitStack, repr=False)

    def finish(self) -> int | None:
        """Leave the mode, print the report, and return the exit status if it is not the program's."""
        self.entered.close()
        if self.is_program and not self.report.has_run and not self.status:
            self.report.problem("The program has not used the device. `djinn run --help` lists the modes; a program "
                                f"can name the device {self.mode.device} itself.")
        if self.is_program or self.report.has_run:
            self._print()
        if self.strict and self.report.problems and not self.status:
            return STRICT_STATUS
        return self.status if self.status < 0 else None

    def cancel(self) -> None:
        """Leave the mode, and report nothing: the program does not begin."""
        self.entered.close()
        leaving.at_the_end(lambda: None)

    def _print(self) -> None:
        report = self.report
        lines = [report.summary(), *report.notes, *report.problems]
        if self.strict and report.problems and not self.status:
            lines.append(f"The exit status is {STRICT_STATUS}, because of --strict.")
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.write("".join(f"djinn run: {line}\n" for line in lines))


def choose(plugins: Plugins, name: str = "") -> RunMode:
    """Choose a mode.

    Args:
        plugins: The plugins.
        name: Its name; empty for the one that the configuration chooses, or the default.

    Raises:
        AmbiguousPluginError, PluginError: As for `djinn.plugins.Plugins.find`.
    """
    if not name:
        chosen: RunMode = plugins.choose("mode", DEFAULTS["mode"])
        return chosen
    named = plugins.registered("mode").get(name, [])
    if len(named) != 1:
        known = ", ".join(sorted(plugins.registered("mode"))) or "none"
        raise PluginError(f"There {'are several modes' if named else 'is no mode'} {name!r}.",
                          hint=f"Modes are {known}. Correct --as, or install a plugin that brings the mode.")
    found: RunMode = named[0].value
    return found


def begin(mode: RunMode, *, strict: bool = False, is_program: bool = False) -> ActiveRun:
    """Enter a mode for the rest of this process; the mode that was entered before is left.

    Processes that this one starts enter it, too.
    """
    global _run
    if _run is not None:
        _run.entered.close()
    run = ActiveRun(mode, RunReport() if _run is None else _run.report, strict, is_program)
    run.entered.enter_context(mode.enter(RunContext(devices.logical_device(), run.report)))
    os.environ[RUN_AS] = mode.name
    _run = run
    leaving.at_the_end(run.finish)
    return run


def leave() -> None:
    """Leave the mode that was entered; nothing is reported at the end."""
    global _run
    if _run is not None:
        _run.cancel()
        os.environ.pop(RUN_AS, None)
        _run = None


def session_started(session: Session) -> None:
    """Report where a session's operations run."""
    if _run is not None:
        address = session.backend.address
        place = "this process" if address.startswith("local:") else address
        _run.report.begins(f"{place} ({session.backend.welcome.device})")


def session_ended(stats: Mapping[str, int]) -> None:
    """Report what a session has done."""
    if _run is not None:
        _run.report.ended(stats)
