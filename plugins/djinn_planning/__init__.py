"""Lets the chosen scheduler order the operations of each new program of a session with one executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import Arrange
    from djinn.session.session import Session


@hookimpl(trylast=True)
def djinn_arrange_programs(session: Session) -> Arrange | None:
    """Give a function that asks the chosen scheduler."""
    from djinn_planning.arranging import Arranger

    return Arranger(session)
