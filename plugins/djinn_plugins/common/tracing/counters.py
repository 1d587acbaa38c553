"""The counters of the running session, since it began or since they were reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

from djinn.errors import ConfigurationError
from djinn.session import runtime
from djinn_plugins.common.tracing import waits

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("reset_stats", "stats")

_LEVELS = frozenset({"journal_bytes", "journal_ms", "journal_nodes", "live_handles", "pending_nodes", "programs_known",
                     "results_kept", "results_kept_bytes"})
"""Entries of `stats` that are levels, not counters; `reset_stats` does not reset them."""
_baselines: WeakKeyDictionary[Session, Mapping[str, int]] = WeakKeyDictionary()


@overload
def stats() -> Mapping[str, int]: ...
@overload
def stats(by: Literal["line"]) -> waits.WaitTable: ...
def stats(by: str | None = None) -> Mapping[str, Any]:
    """Return the counts since the session began, or since `reset_stats`.

    Args:
        by: ``"line"`` for the round trips by line of the program: a mapping that prints as a table.

    Raises:
        ConfigurationError: ``by`` is something else.
    """
    session = runtime.current()
    if by == "line":
        return session.shared(waits.WaitLedger).table()
    if by is not None:
        raise ConfigurationError(f"Counters cannot be grouped by {by!r}.", hint='Use djinn.stats(by="line").')
    baseline = _baselines.get(session, {})
    return {name: count - (0 if name in _LEVELS else baseline.get(name, 0)) for name, count in session.stats().items()}


def reset_stats() -> None:
    """Reset the counters to zero."""
    session = runtime.current()
    _baselines[session] = session.stats()
    session.shared(waits.WaitLedger).reset()
