"""What tests of sessions with several executors need."""

from __future__ import annotations

from djinn_backend_fleet.fleet import Fleet
from djinn_lib_schedule.wrapping import unwrapped

from djinn.session.session import Session


def fleet_of(session: Session) -> Fleet:
    backend = unwrapped(session.backend)
    assert isinstance(backend, Fleet)
    return backend
