"""What engines have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from djinn.errors import ConfigurationError
from djinn_lib_cluster.kinds import ProgramReport

__all__ = ("already_running", "changes")


def changes(programs: Callable[[], list[ProgramReport]], every_s: float) -> Iterator[list[ProgramReport]]:
    """Report states now, and after each change, until no program is left; see `djinn_lib_cluster.kinds.Engine.watch`.

    Args:
        programs: Returns the present states.
        every_s: How long to wait between two looks at them.
    """
    last: list[ProgramReport] | None = None
    while last != []:
        now = programs()
        if now != last:
            yield now
            last = now
        else:
            time.sleep(every_s)


def already_running(name: str) -> ConfigurationError:
    """Return the error for a cluster that is to be started, and is running."""
    return ConfigurationError(f"The cluster {name} is running already.",
                              hint="Stop it with `djinn cluster down`, or choose another --name.")
