"""Waits for values of `djinn.later`, for a log or at a session's end; keeps failures for the program's next wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from djinn.errors import DjinnError
from djinn.kinds import Backend
from djinn_plugins.client.later.outstanding import OutstandingValue, OutstandingValues

__all__ = ("fetch_outstanding",)


def fetch_outstanding(backend: Backend, outstanding: OutstandingValues, values: Sequence[OutstandingValue], *,
                      whole: bool) -> None:
    """Block until `djinn.later` values arrive; keep a failure for the program's next wait.

    Args:
        backend: The backend to ask.
        outstanding: The session's values.
        values: Those to wait for.
        whole: Whether to send the whole tape, or only what the values need.
    """
    def fetched(some: Sequence[OutstandingValue]) -> list[Any] | Exception:
        try:
            return backend.fetch([value.slot for value in some], whole=whole)
        except Exception as error:  # noqa: BLE001  # not swallowed: raised when the program reads the value
            if not isinstance(error, DjinnError):
                # This may be the report of another operation's failure.
                outstanding.unheard = outstanding.unheard or error.with_traceback(None)
            return error.with_traceback(None)

    together = fetched(values) if values else []
    for position, value in enumerate(values):
        found = together[position:position + 1] if isinstance(together, list) else fetched([value])
        if value.is_settled:
            # It has arrived meanwhile.
            continue
        outstanding.drop(value)
        if isinstance(found, list):
            value.arrived(found[0])
        else:
            value.failed(found)
