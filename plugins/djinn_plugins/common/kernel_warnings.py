"""Collects the warnings that kernels give, for the client.

PyTorch buffers the warnings of a thread while one of its own functions runs that Python has called, and hands them to
Python's ``warnings`` when that function returns. Operators called from a program have no such function around them, so
a run is called through one here.

``warnings`` belongs to the whole process. In the client's process its filters decide first, on the thread of the
executor; what they let pass is given at the client's next wait again, where they decide for the user's line. A server's
process has no user, and lets every warning pass.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from djinn.wire.messages import MAX_TEXT, MAX_WARNINGS, Warned

__all__ = ("KernelWarnings", "pass_all")

_T = TypeVar("_T")
_call: Callable[..., Any] = torch._C._disabled_torch_function_impl
_INTERNALS = re.compile(r" \(Triggered internally at [^()]*\)$")
__warningregistry__: dict[Any, Any] = {}
"""Python remembers here what it has shown; it is forgotten before each run."""


class _Collecting(threading.local):
    """How often each warning was given in the run on this thread; ``None`` if there is none."""

    given: dict[Warned, int] | None = None


_here = _Collecting()


class KernelWarnings:
    """The warnings of one session that its client has not been told of.

    At most `MAX_WARNINGS` are kept between two answers; each text is kept before another is repeated.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._pending: dict[Warned, int] = {}
        _see_warnings()

    def of(self, run: Callable[[], _T]) -> _T:
        """Call a function, and keep the warnings that kernels give in it."""
        results, given = collected(run)
        for warned, count in given.items():
            _count(self._pending, warned, count)
        return results

    @property
    def pending(self) -> bool:
        """Whether there are any that `take` would return."""
        return bool(self._pending)

    def take(self) -> tuple[Warned, ...]:
        """Return the warnings since the last call."""
        counts, self._pending = self._pending, {}
        taken: list[Warned] = []
        spare = MAX_WARNINGS - len(counts)
        for warned, count in counts.items():
            repeats = min(count - 1, spare)
            spare -= repeats
            taken += [warned] * (1 + repeats)
        return tuple(taken)


def pass_all() -> None:
    """Keep every warning of kernels in this process: the filters of clients decide."""
    warnings.filterwarnings("always", module=rf"{re.escape(__name__)}\Z")


def collected(run: Callable[[], _T]) -> tuple[_T, dict[Warned, int]]:
    """Call a function; return its result, and how often kernels gave each warning."""
    results: list[_T] = []
    given: dict[Warned, int] = {}
    __warningregistry__.clear()
    _here.given = given
    try:
        _call(lambda: results.append(run()), (), (), {})
    except Warning as error:
        # A filter makes errors of warnings. The run is over by then, and the client's filters decide again.
        if not results:
            raise
        _count(given, _warned(error))
    finally:
        _here.given = None
    return results[0], given


def _count(counts: dict[Warned, int], warned: Warned, more: int = 1) -> None:
    if warned in counts or len(counts) < MAX_WARNINGS:
        counts[warned] = counts.get(warned, 0) + more


def _warned(warning: Warning) -> Warned:
    return Warned(type(warning).__name__, _INTERNALS.sub("", str(warning))[:MAX_TEXT])


def _see_warnings() -> None:
    """Have Python keep this module's warnings instead of showing them. Other warnings are shown as before."""
    if getattr(warnings.showwarning, "__module__", "") == __name__:
        return
    shows = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if _here.given is None or filename != __file__:
            shows(message, category, filename, lineno, *rest)
        else:
            _count(_here.given, _warned(message if isinstance(message, Warning) else category(message)))

    warnings.showwarning = show  # type: ignore[assignment]  # passes the rest on
