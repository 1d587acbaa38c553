"""What tests of sessions with several executors need."""

from __future__ import annotations

from djinn_backend_fleet.fleet import Fleet

from djinn.session.session import Session


def fleet_of(session: Session) -> Fleet:
    assert isinstance(session.backend, Fleet)
    return session.backend
