"""Wrapping a backend so that it recovers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from djinn.ir.tape import Tape
from djinn.kinds import Backend, BackendContext, Connection, OpenBackend
from djinn.settings import Config
from djinn_plugins.common.settings.placement import PlacementSettings
from djinn_plugins.replay.metering import MeteredConnection
from djinn_plugins.replay.reconnecting import HERE, Reconnector
from djinn_plugins.replay.recovering import Recovering
from djinn_plugins.replay.replaying import ReplayTarget
from djinn_plugins.replay.settings import RecoverySettings

__all__ = ("open_recovering",)


def open_recovering(
    opens: OpenBackend, context: BackendContext, connections: Sequence[Connection], tape: Tape, released: deque[int]
) -> Recovering:
    """Open a backend that begins again on another server when a server dies.

    Args:
        opens: Opens the backend that does the work.
        context: Settings, and how to connect again.
        connections: The first connections, one for each executor.
        tape: The session's tape.
        released: Numbers of values that the program no longer refers to.
    """
    config, settings = context.settings(Config), context.settings(RecoverySettings)
    reconnector = Reconnector(
        config.addresses, context.connect, settings.recovery_timeout_s,
        fills_up=context.settings(PlacementSettings).placement == "explicit", falls_back=settings.local_fallback,
        fallbacks=sum(connection.address == HERE != address for connection, address in zip(
            connections, config.addresses, strict=True) if address), failover_s=settings.failover_timeout_s)

    def make(opened: Sequence[Connection]) -> ReplayTarget:
        own_tape, own_released = Tape(), deque[int]()
        return ReplayTarget(opens(opened, own_tape, own_released), own_tape, own_released)

    meters = list(map(MeteredConnection, connections))
    hands = make(meters)
    devices = _devices_of(hands.backend, context.device)
    return Recovering(make, meters, hands, reconnector, tape, released, context.numbers, devices,
                      settings.recovery_bytes, settings.recovery_budget_s)


def _devices_of(backend: Backend, first: torch.device) -> list[torch.device | None]:
    """List the devices with separate random number generators; ``None`` stands for the only device."""
    if backend.device_count == 1:
        return [None]
    return [torch.device(first.type, index) for index in range(backend.device_count)]
