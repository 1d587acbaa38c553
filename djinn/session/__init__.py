"""Sessions: settings, connections, and the backend that takes recorded operations to executors.

The package can be called: ``djinn.session(...)`` is a context in which a session runs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Session(ModuleType):
    """The package under its other name; see `djinn_lib_async.face.session`."""

    def __call__(self, server: str | None = None, **settings: Any) -> Any:
        from djinn import later

        return later.load("session")(server, **settings)


sys.modules[__name__].__class__ = _Session
