"""Composing what recovers: connections, how to get others, and a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from djinn.fleet.fleet import Fleet
from djinn.ir.tape import Tape
from djinn.kinds import Connection
from djinn.link import Link
from djinn.recovery.reconnecting import Reconnector
from djinn.recovery.recovering import Recovering
from djinn.recovery.replaying import Hands

if TYPE_CHECKING:
    from djinn.session import Session


def compose_recovering(
    connections: Sequence[Connection], session: Session,
    link: Callable[[Sequence[Connection], Tape, deque[int]], Link | Fleet],
) -> Recovering:
    """Make the layer that goes on when servers die.

    Args:
        connections: One for each executor.
        session: Whose layer it is.
        link: Makes what hands a tape over, and frees what is released.
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
