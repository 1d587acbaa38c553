"""Ending with the process that has started this one, as ``--with-parent`` asks."""

from __future__ import annotations

import os

import anyio

__all__ = ("await_parent_end",)

TICK_S = 0.5
"""How often to check that the parent process is still there, on systems that do not report its end."""


async def await_parent_end(parent: int) -> None:
    """Wait until the parent process has ended.

    Args:
        parent: Its process ID, as `os.getppid` returned it when this process began.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        while os.getppid() == parent:  # noqa: ASYNC110  # the system reports no event
            await anyio.sleep(TICK_S)
        return
    try:
        # If it ended before, this may be another process by now.
        if os.getppid() == parent:
            await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
