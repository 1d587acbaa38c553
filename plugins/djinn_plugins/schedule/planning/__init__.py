"""Lets the chosen scheduler order the operations of each new program of a session with one executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import Arrange
    from djinn.session.session import Session


_PROGRAM_ORDER = "djinn-scheduler-single"
"""The plugin whose scheduler is used if none is chosen. For one device, it gives program order."""


@hookimpl(trylast=True)
def djinn_arrange_programs(session: Session) -> Arrange | None:
    """Give a function that asks the chosen scheduler; none is needed for program order."""
    if "scheduler" not in session.plugins.selection.chosen and _PROGRAM_ORDER not in session.plugins.disabled:
        # Making a graph of each new program, and checking its schedule, takes longer than recording it.
        return None
    from djinn_plugins.schedule.planning.arranging import Arranger

    return Arranger(session)
