"""Loss of the device: its sessions learn the reason, and the process ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from djinn.errors import DeviceLostError, DjinnError, TransportError
from djinn.wire.messages import Result
from djinn_plugins.common.kinds.executor import Executor, SupportsDeviceLoss

__all__ = ("DeviceLoss",)

_HINT = ("A kernel failed on the device, most often for an index that is out of range. Look for it on a CPU, which "
         "names the operation; then call djinn.init() to start a new session.")
_HINT_OF_OTHERS = ('What the session held there is lost. With recovery="replay" it is computed again; otherwise call '
                   "djinn.init() to start a new session.")
MAX_NAMED = 8
"""Most operators that an error names."""
_log = logging.getLogger("djinn.server")


class DeviceLoss:
    """Detects the loss of the device.

    The session that sees the loss first is blamed. Its program need not be the cause, because devices compute
    asynchronously. But it usually is, since the session that waits for a value sees the loss first. To all other
    sessions, the loss is a broken connection, as after a crash: they recover if they can.

    Args:
        executor: The executor of the device.
        leave: Ends the process.

    Concurrency:
        Any thread.
    """

    def __init__(self, executor: Executor, leave: Callable[[], None] | None) -> None:
        self._device = executor.device
        self._ask = executor.loss if isinstance(executor, SupportsDeviceLoss) else None
        self._leave = leave
        self._lock = threading.Lock()
        self._reason = ""
        self._blamed: object = None

    def is_anothers(self, session: object) -> bool:
        """Whether the device is lost, and another session is blamed: then a failure of this one has another cause."""
        return self._look(session) and self._blamed is not session

    def explained(self, session: object, result: Result, suspects: Callable[[], Sequence[str]]) -> Result:
        """Add to the failures of a session that is blamed for a loss which operations may have caused it."""
        if not result.failures or not self._look(session) or self._blamed is not session:
            return result
        found = _suspected(suspects())
        return msgspec.structs.replace(result, failures=tuple([
            msgspec.structs.replace(failure, message=f"{failure.message}\n{found}") if found and (
                self._reason in failure.message) else failure for failure in result.failures]))

    def check(self, session: object, tell: Callable[[DjinnError], None],
              end_others: Callable[[DjinnError], None], suspects: Callable[[], Sequence[str]] = tuple) -> bool:
        """End the process if the device is lost, and return whether it is.

        Args:
            session: What stands for the session that has just used the device.
            tell: Sends an error to this session.
            end_others: Ends all other sessions with an error.
            suspects: Names operators that may have caused it, if this session has.
        """
        if not self._look(session):
            return False
        others = TransportError(f"The device {self._device} is lost to a program of another session: {self._reason}.",
                                hint=_HINT_OF_OTHERS)
        if self._blamed is not session:
            tell(others)
            return True
        summary = f"The device {self._device} is lost: {self._reason}."
        error = DeviceLostError(f"{summary} {_suspected(suspects())}".rstrip(), hint=_HINT)
        _log.error("%s The process ends.", summary)
        tell(error)
        end_others(others)
        if self._leave is not None:
            self._leave()
        return True

    def _look(self, session: object) -> bool:
        """Whether the device is lost; the first session for which this is called after that is blamed."""
        if self._ask is None:
            return False
        with self._lock:
            if not self._reason:
                self._reason = self._ask()
                self._blamed = session if self._reason else None
            return bool(self._reason)


def _suspected(operators: Sequence[str]) -> str:
    """Name operators in a sentence; empty if there are none."""
    if not operators:
        return ""
    named = ", ".join(operators[:MAX_NAMED]) + (", ..." if len(operators) > MAX_NAMED else "")
    return f"Since its last value, the session ran these operations that check values there: {named}."
