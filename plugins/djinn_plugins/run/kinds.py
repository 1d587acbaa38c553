"""Run modes: the ways in which a program that does not mention djinn uses the remote device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import attrs

from djinn_plugins.run.report import RunReport

if TYPE_CHECKING:
    import torch

__all__ = ("RunContext", "RunMode")


@attrs.frozen
class RunContext:
    """What a mode gets when it is entered.

    Attributes:
        device: The remote device.
        report: Takes what the user should know at the end of the run.
    """

    device: torch.device
    report: RunReport = attrs.field(factory=RunReport)


class RunMode(Protocol):
    """A way to let a program use the remote device.

    `djinn run` enters one before the program starts; processes that the program starts enter it on ``import torch``.

    Concurrency:
        Entered by one thread; the program's threads then run within it.
    """

    name: str
    """Name in the configuration, and after ``--as``."""
    help: str
    """One line about it, without a full stop."""
    device: str
    """What the program calls the remote device, such as ``cuda:0``; it names the device only within the mode."""

    def enter(self, context: RunContext) -> AbstractContextManager[None]:
        """Return a context in which programs use the remote device.

        It may change anything in this process, including its environment variables, and must take all of it back. It
        must not start a session: programs that never use the device must not need a server.

        Args:
            context: The device, and the report that the user reads at the end.

        Laws:
            mode.described, mode.taken_back, mode.exceptions_pass, mode.cpu_unchanged, mode.device_is_remote,
            mode.starts_no_session
        """
