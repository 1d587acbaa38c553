"""Loss of the device: the session that ran last gets the reason, and the process ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from djinn_lib_service.kinds.executor import Executor, SupportsDeviceLoss

from djinn.errors import DeviceLostError, DjinnError

__all__ = ("DeviceLoss",)

_HINT = ("A kernel failed on the device, most often for an index that is out of range. Look for it on a CPU, which "
         "names the operation; then call djinn.init() to start a new session.")
_log = logging.getLogger("djinn.server")


class DeviceLoss:
    """Detects the loss of the device.

    Args:
        executor: The executor of the device.
        leave: Ends the process. To innocent sessions this is a broken connection, as after a crash, and they recover if
            they can.

    Concurrency:
        Any thread.
    """

    def __init__(self, executor: Executor, leave: Callable[[], None] | None) -> None:
        self._device = executor.device
        self._ask = executor.loss if isinstance(executor, SupportsDeviceLoss) else None
        self._leave = leave

    def check(self, tell: Callable[[DjinnError], None]) -> bool:
        """End the process if the device is lost, and return whether it is.

        The program that ran last need not be the cause, because devices compute asynchronously. But it usually is,
        since the session that waits for a value sees the loss first.

        Args:
            tell: Sends the error to the session that ran last.
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
