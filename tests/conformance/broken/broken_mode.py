"""A run mode that keeps every law, and others that do not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from djinn.hookspecs import hookimpl
from djinn.session import runtime
from djinn_plugins.device.accelerator.availability import make_available
from djinn_plugins.run.kinds import RunContext

BROKEN: dict[str, tuple[str, set[str]]] = {
    "speaks-at-length": ("mode.described", set()),
    "leaves-a-variable": ("mode.taken_back", {"mode.exceptions_pass"}),
    "swallows-errors": ("mode.exceptions_pass", set()),
    "takes-all": ("mode.cpu_unchanged", {"mode.device_is_remote"}),
    "stays-home": ("mode.device_is_remote", set()),
    "connects-at-once": ("mode.starts_no_session", {"mode.cpu_unchanged"}),
}
"""Name of each broken mode, the law that it breaks, and others that it may break as a consequence."""


class _Mode:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self.help = "Uses the device. And more." if flaw == "speaks-at-length" else "uses the device"
        self.device = "cpu" if flaw == "stays-home" else "remote_accelerator:0"
        self._entered = 0

    @contextlib.contextmanager
    def enter(self, context: RunContext) -> Iterator[None]:
        self._entered += 1
        if self._flaw == "connects-at-once":
            runtime.ensure_initialized()
        if self._flaw == "leaves-a-variable":
            os.environ["TIMES_ENTERED"] = str(self._entered)
        swallowed = contextlib.suppress(SystemExit) if self._flaw == "swallows-errors" else contextlib.nullcontext()
        everything = torch.device(context.device) if self._flaw == "takes-all" else contextlib.nullcontext()
        with swallowed, everything, make_available():
            yield


@hookimpl
def djinn_register_modes(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Mode(name))
