"""What tests of sessions with several executors need."""

from __future__ import annotations

from djinn.fleet.fleet import Fleet
from djinn.session import Session


def fleet_of(session: Session) -> Fleet:
    assert isinstance(session.link, Fleet)
    return session.link
