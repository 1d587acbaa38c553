"""Builds the recovering layer of a session: its connections, the reconnector and the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from djinn.fleet.fleet import Fleet
from djinn.kinds import Connection
from djinn.link import Link
from djinn.recovery.reconnecting import Reconnector
from djinn.recovery.recovering import Recovering
from djinn.recovery.replaying import Hands
from djinn.tape import Tape

if TYPE_CHECKING:
    from djinn.session import Session


def compose_recovering(
    connections: Sequence[Connection], session: Session,
    link: Callable[[Sequence[Connection], Tape, deque[int]], Link | Fleet],
) -> Recovering:
    """Create the layer that lets a session survive the death of its servers.

    Args:
        connections: One per executor.
        session: The session that the layer belongs to.
        link: Creates the object that submits a tape and frees released values.
    """
    from djinn import runtime

    config, plugins = session.config, session.plugins
    reconnector = Reconnector(
        config.addresses, lambda address: runtime.connect(config, plugins, address), config.recovery_timeout_s,
        fills_up=config.placement == "explicit", falls_back=config.local_fallback)

    def make(opened: Sequence[Connection]) -> Hands:
        tape, released = Tape(), deque[int]()
        return Hands(link(opened, tape, released), tape, released)

    devices: list[torch.device | None] = [None]
    if session.device_count > 1:
        devices = [torch.device(session.device.type, index) for index in range(session.device_count)]
    return Recovering(make, connections, reconnector, session.tape, session.released, session.recorder.numbers, devices,
                      config.recovery_bytes, config.recovery_budget_s)
