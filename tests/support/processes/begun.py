"""Imports what sessions import when they begin, for processes whose forks begin sessions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module

__all__ = ("begin_session", "import_begun")


def begin_session() -> None:
    """Begin a session in this process, and run something in it."""
    import torch

    import djinn

    device = djinn.init("local://").device
    (torch.ones(2, device=device) + 1).tolist()


def import_begun(begin: Callable[[], object]) -> None:
    """Import the modules of djinn that a function imports. A fork calls it, so that nothing has begun here.

    If it fails, nothing is imported; the next call of the function shows why.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        before = set(sys.modules)
        try:
            begin()
            os.write(writer, json.dumps([name for name in sys.modules if name not in before]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    os.waitpid(pid, 0)
    for name in json.loads(text or "[]"):
        if name.startswith("djinn"):
            import_module(name)
