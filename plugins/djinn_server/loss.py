"""A device that is lost to the process: the session that lost it learns why, and the process ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from djinn_lib_service.abilities import LosableExecutor

from djinn.errors import DeviceLostError, DjinnError
from djinn.kinds.executor import Executor

__all__ = ("DeviceLoss",)

_HINT = ("A kernel failed on the device, most often for an index that is out of range. Look for it on a CPU, which "
         "names the operation; then call djinn.init() to start a new session.")
_log = logging.getLogger("djinn.server")


class DeviceLoss:
    """Looks whether the device is still there.

    Args:
        executor: Whose device it is.
        leave: Ends the process. Sessions that did nothing wrong find their connection broken, as after a crash, and
            recover if they can.

    Concurrency:
        Any thread.
    """

    def __init__(self, executor: Executor, leave: Callable[[], None] | None) -> None:
        self._device = executor.device
        self._ask = executor.loss if isinstance(executor, LosableExecutor) else None
        self._leave = leave

    def check(self, tell: Callable[[DjinnError], None]) -> bool:
        """End the process if the device is lost, and return whether it is.

        What ran last need not be what lost it: a device computes on its own. But most often it is, since whoever waits
        for a value learns of it first.

        Args:
            tell: Tells the session that ran last.
        """
        reason = self._ask() if self._ask is not None else ""
        if not reason:
            return False
        error = DeviceLostError(f"The device {self._device} is lost: {reason}.", hint=_HINT)
        _log.error("%s The process ends.", error.summary)
        tell(error)
        if self._leave is not None:
            self._leave()
        return True
