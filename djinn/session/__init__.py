"""Sessions: settings, connections, and the backend that takes recorded operations to executors.

The package can be called: ``djinn.session(...)`` is a context in which a session runs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from djinn import lazy_names


class _Session(ModuleType):
    """The package under its other name; see `djinn_plugins.sessions.asynchronous.face.session`."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return lazy_names.load("session")(*args, **settings)


sys.modules[__name__].__class__ = _Session
