"""What the operator is shown of a session."""

from __future__ import annotations

import msgspec

__all__ = ("EVERYBODY", "SessionRow")

EVERYBODY = "-"
"""Stands for the tenant without a name: all clients, if there is at most one token."""


class SessionRow(msgspec.Struct):
    """A session, as shown to the operator.

    Attributes:
        tenant: Its tenant; empty if all clients are one tenant.
        session: Its name; empty for a worker that does not answer and runs no program.
        worker: Process ID of its worker.
        peer: The client's address.
        age_s: Time since it began.
        idle_s: Time since the last message from its client; 0 while it is busy.
        queued: Programs of the last message that have not finished.
        running_s: How long its program has been running; 0 if none is.
        held_bytes: Bytes that it holds.
        values: Number of values that it holds.
        name: The name that its client has given; empty if it has none.
        left_s: How long it stays, if no client has it open; 0 if one has.
        program: Name of the program that it runs, or has run last; empty if it has run none.
        answers: Whether its worker has reported this; if not, only the running program and its start are known.
    """

    tenant: str
    session: str
    worker: int
    peer: str = ""
    age_s: float = 0.0
    idle_s: float = 0.0
    queued: int = 0
    running_s: float = 0.0
    held_bytes: int = 0
    values: int = 0
    answers: bool = True
    name: str = ""
    left_s: float = 0.0
    program: str = ""
