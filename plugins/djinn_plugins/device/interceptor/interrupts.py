"""Handles Ctrl-C while PyTorch is running, where Python's default handler would abort the process.

PyTorch checks for signals in places where no exception may be raised: in calls of a device written in Python, whenever
it records a gradient; and in a destructor, while an exception propagates out of a backward pass.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
from pathlib import Path
from threading import get_ident, main_thread
from time import sleep
from types import FrameType
from typing import Any

import torch

import djinn
from djinn_plugins.common.interrupts import InterruptHandler

__all__ = ("DeviceInterruptHandler", "interrupts")

_KERNEL = Path(djinn.__file__).parent
_ROOMS = Path(__file__).parents[2]
_RECORDING = (*(f"{folder}{os.sep}" for folder in (
    Path(torch.__file__).parent, *(_KERNEL / name for name in ("ir", "record", "session")),
    _ROOMS / "device" / "interop", _ROOMS / "device" / "interceptor")), str(_ROOMS / "common" / "interrupts.py"))
"""Files whose functions may have PyTorch running beneath them."""
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_CALLED = (_LIBRARY, "<attrs generated", "<frozen ")
"""Files whose functions act on behalf of their callers: Python's own, and generated ones."""
_INSTALLED = f"{_LIBRARY}site-packages"
_SIG_IGN = ctypes.c_void_p(int(signal.SIG_IGN))
_set_handler = ctypes.pythonapi.PyOS_setsig
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
AGAIN_S = 0.002
"""Delay before an interrupt that could not be raised is tried again."""


class DeviceInterruptHandler(InterruptHandler):
    """Raises `KeyboardInterrupt`, but not while PyTorch or the recording is running.

    In that case, it is raised by the next recorded operation, the next `SessionLock` that is acquired, or the user's
    code, whichever comes first.

    As a context manager, it surrounds a backward pass. Within it one interrupt raises, and the system ignores later
    ones until the end. Python's own table of handlers stays unchanged, for an interrupt that has just arrived.

    Source:
        ``PyObject_Str`` of CPython checks for signals, and ``get_type_override`` of pybind11 calls it, for
        ``PythonDeviceGuard::exchangeStream`` in the destructor of PyTorch's ``InlineStreamGuard``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_pending = False
        self._comes_again = False
        self._tries = 0
        self._depth = 0
        self._ignored: int | None = None
        """The previous handler, while the system ignores the signal."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        comes_again, self._comes_again = self._comes_again, False
        if (comes_again and not self._is_pending) or self._ignored is not None:
            return
        if not _records(frame):
            self._is_pending = False
            self.raises()
            raise KeyboardInterrupt
        self._is_pending = True
        hurry = None if self.hurry is None else self.hurry()
        if hurry is not None:
            hurry()
        # From another thread: a signal raised from this one would arrive at once.
        self._tries += 1
        _thread.start_new_thread(self._again, (number, self._tries))

    def __enter__(self) -> None:
        if get_ident() == main_thread().ident:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == main_thread().ident:
            self._depth -= 1
            if not self._depth and self._ignored is not None:
                handler, self._ignored = self._ignored, None
                _set_handler(signal.SIGINT, handler)

    def take(self) -> bool:
        """Whether an interrupt is pending; the caller is then responsible for raising it."""
        is_pending, self._is_pending = self._is_pending, False
        return is_pending

    def raises(self) -> None:
        """Within a backward pass, ignore later interrupts."""
        if self._depth and self._ignored is None:
            self._ignored = _set_handler(signal.SIGINT, _SIG_IGN)

    def set(self, handler: Any) -> None:
        """Set Python's handler of the signal; if the system ignored the signal, it continues to do so."""
        super().set(handler)
        if self._ignored is not None:
            _set_handler(signal.SIGINT, _SIG_IGN)

    def _again(self, number: int, tries: int) -> None:
        sleep(AGAIN_S)
        if self._is_pending and self._tries == tries:
            self._comes_again = True
            _thread.interrupt_main(signal.Signals(number))


def _records(frame: FrameType | None) -> bool:
    """Whether PyTorch or the recording is running, in this function or in its callers."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_CALLED) or file.startswith(_INSTALLED):
            return file.startswith(_RECORDING)
        frame = frame.f_back
    return False


interrupts = DeviceInterruptHandler()
