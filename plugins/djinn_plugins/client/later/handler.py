"""A handler for `logging` that lets the program continue while the values of a line are in flight."""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
from collections import deque
from time import monotonic
from typing import Any

import attrs

from djinn_plugins.client.later.values import LaterValue, fail, look, wait_for, wait_for_refused

__all__ = ("LaterHandler",)

LOOK_S = 0.02
"""How often the thread looks whether values have arrived, while lines wait for some."""
IDLE_S = 0.25
"""After how long without a new operation the thread sends those that are pending, and waits for all values."""
WAIT_S = 0.5
"""How often the thread waits for what cannot come on its own, while the program continues."""
_CONVERSION = re.compile(r"%(\([^)]*\))?[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[hlL]?([a-zA-Z%])")


@attrs.define(eq=False)
class _Line:
    """A record that has not been given to the target, and the values in it."""

    record: logging.LogRecord
    values: list[LaterValue]


class LaterHandler(logging.Handler):
    """Gives records to another handler, in their order, each when the values of `djinn.later` in it have arrived.

    ``logging.basicConfig(handlers=[djinn.LaterHandler(logging.StreamHandler())])`` lets
    ``logger.info("loss %.4f", djinn.later(loss))`` never wait. The remaining lines are written when the program ends.

    Args:
        target: The handler that writes the lines. Its formatter and its level hold.

    Concurrency:
        Any thread may log. A thread of the handler's own writes the lines that had to wait.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self.target = target
        self.formatter = target.formatter
        self._lines: deque[_Line] = deque()
        self._changed = threading.Condition()
        self._writing = threading.RLock()
        self._process = os.getpid()
        self._has_thread = False

    def emit(self, record: logging.LogRecord) -> None:
        """Give a record to the target, now or when its values are here."""
        if record.levelno < self.target.level:
            return
        if self._process != os.getpid():
            # A forked child: the lines are its parent's, and so is the thread.
            self._process, self._has_thread = os.getpid(), False
            self._lines, self._changed, self._writing = deque(), threading.Condition(), threading.RLock()
        values = _values_in(record)
        with self._changed:
            if self._lines or not all(value.is_settled for value in values):
                self._lines.append(_Line(copy.copy(record), values))
                if not self._has_thread:
                    self._has_thread = True
                    threading.Thread(target=self._write_lines, name="djinn-later", daemon=True).start()
                self._changed.notify_all()
                return
        self._write(_Line(record, values))

    def flush(self) -> None:
        """Wait for the values of all lines, and write them."""
        while self._write_first(waits=True):
            pass
        self.target.flush()

    def close(self) -> None:
        """Write all lines, and close the target."""
        self.flush()
        self.target.close()
        super().close()

    def setFormatter(self, fmt: logging.Formatter | None) -> None:  # noqa: N802  # as the base class calls it
        """Set the target's formatter."""
        super().setFormatter(fmt)
        self.target.setFormatter(fmt)

    def _write_lines(self) -> None:
        quiet = _QuietTape()
        while True:
            with self._changed:
                if not self._lines:
                    self._has_thread = False
                    return
            if not self._write_first(waits=False):
                with self._changed:
                    self._changed.wait(LOOK_S)
                quiet.look(self._lines)

    def _write_first(self, *, waits: bool) -> bool:
        """Write the first line, if it can be written; return whether it was."""
        with self._writing:
            with self._changed:
                line = self._lines[0] if self._lines else None
            if line is None:
                return False
            if waits:
                for session in {value.session for value in line.values}:
                    if session is not None:
                        wait_for(session, line.values)
            elif not all(value.is_settled for value in line.values):
                return False
            try:
                self._write(line)
            finally:
                with self._changed:
                    self._lines.popleft()
            return True

    def _write(self, line: _Line) -> None:
        if line.values:
            _fill_in(line.record)
        self.target.handle(line.record)


class _QuietTape:
    """Notices when no operation has been recorded for a while."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since_s = self._waited_s = 0.0

    def look(self, lines: deque[_Line]) -> None:
        """Let the values of the first line arrive that is waiting."""
        session = next((value.session for line in tuple(lines) for value in line.values
                        if value.session is not None), None)
        if session is None:
            return
        seen, now_s = (session.backend.nodes_taken, len(session.tape.nodes)), monotonic()
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        is_quiet = now_s - self._since_s >= IDLE_S
        try:
            look(session, flushes=is_quiet)
            if is_quiet or now_s - self._waited_s >= WAIT_S:
                self._waited_s = now_s
                wait_for_refused(session, whole=is_quiet)
        except Exception as error:  # noqa: BLE001  # not swallowed: the lines say it, and so does the program's next wait
            fail(session, [value for line in tuple(lines) for value in line.values], error)


def _values_in(record: logging.LogRecord) -> list[LaterValue]:
    arguments = record.args.values() if isinstance(record.args, dict) else record.args or ()
    return [value for value in (record.msg, *arguments, *record.__dict__.values()) if isinstance(value, LaterValue)]


def _fill_in(record: logging.LogRecord) -> None:
    """Replace the values in a record by numbers and tensors, or by the reason of a failure."""
    for name, value in tuple(record.__dict__.items()):
        if isinstance(value, LaterValue):
            record.__dict__[name] = _plain(value)
    arguments = record.args
    if isinstance(arguments, dict):
        failed = {name for name, value in arguments.items() if _has_failed(value)}
        record.args = {name: _plain(value) for name, value in arguments.items()}
    elif arguments:
        failed = {position for position, value in enumerate(arguments) if _has_failed(value)}
        record.args = tuple(map(_plain, arguments))
    else:
        return
    if failed:
        record.msg = _as_text(str(record.msg), failed)


def _has_failed(value: object) -> bool:
    return isinstance(value, LaterValue) and value.error is not None


def _plain(value: Any) -> Any:
    if not isinstance(value, LaterValue):
        return value
    if value.error is not None:
        return f"<{type(value.error).__name__}: {value.error}>"
    tensor = value.result()
    return tensor.item() if tensor.dim() == 0 else tensor


def _as_text(message: str, failed: set[Any]) -> str:
    """Let a message format some of its arguments as text."""
    position = -1

    def converted(found: re.Match[str]) -> str:
        nonlocal position
        if found[2] == "%":
            return found[0]
        position += 1
        key = found[1][1:-1] if found[1] else position
        return f"%{found[1] or ''}s" if key in failed else found[0]

    return _CONVERSION.sub(converted, message)
