"""Imports what sessions import when they begin, for processes whose forks begin sessions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module

__all__ = ("import_begun",)


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
