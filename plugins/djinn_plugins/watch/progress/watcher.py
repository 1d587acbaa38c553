"""The thread that looks at connections in use, and shows what takes long."""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import attrs

from djinn_plugins.watch.progress.phases import Phase, advanced

if TYPE_CHECKING:
    from djinn_plugins.watch.progress.connection import ProgressConnection
    from djinn_plugins.watch.progress.screens import Screen

__all__ = ("Watcher", "clear_all", "watcher_of")

TICK_S = 0.1
IDLE_S = 5.0
"""After this time without work, the thread sleeps until it is woken."""


class Watcher:
    """Looks at connections while they are in use; see `djinn_plugins.common.net.waits.WaitListener` for other waits.

    Attributes:
        is_asleep: Whether the thread has to be woken.
        is_showing: Whether something is shown.

    Concurrency:
        Any thread.
    """

    def __init__(self, screen: Screen) -> None:
        self.is_asleep = True
        self.is_showing = False
        self._screen = screen
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._phases: WeakKeyDictionary[ProgressConnection, Phase | None] = WeakKeyDictionary()
        self._wait: tuple[str, Phase] | None = None

    def add(self, connection: ProgressConnection) -> None:
        """Look at a connection, too."""
        with self._lock:
            self._phases[connection] = None

    def remove(self, connection: ProgressConnection) -> None:
        """Look at a connection no longer."""
        with self._lock:
            self._phases.pop(connection, None)
        self.clear()

    def began(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Show a wait for something else than a connection, or a transfer of many messages."""
        kind, now_s, last = "uploading" if total_bytes else "connecting", monotonic(), self._wait
        first = Phase(kind, 0, now_s, now_s, done_bytes) if last is None or last[1].kind != kind else last[1]
        self._wait = what, attrs.evolve(first, done_bytes=done_bytes - first.base_bytes, changed_s=now_s,
                                        total_bytes=max(0, total_bytes - first.base_bytes))
        self.wake()

    def ended(self) -> None:
        """End that wait."""
        self._wait = None
        self.clear()

    def wake(self) -> None:
        """Look at the connections again and again, until they have been idle for a while."""
        with self._lock:
            self.is_asleep = False
            self._woken.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="djinn-progress", daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """Clear the screen, until something else takes long."""
        with self._lock:
            for connection in self._phases:
                self._phases[connection] = None
            if self._wait is None:
                # Otherwise it would be shown again at once: of a transfer, one of many messages has ended.
                self._hide()

    def _look(self) -> None:
        busy_s = monotonic()
        while True:
            now_s = monotonic()
            with self._lock:
                if self._advance(now_s):
                    busy_s = now_s
                elif now_s - busy_s > IDLE_S:
                    self._woken.clear()
                    self.is_asleep = True
                    # A batch that began before it could see that is seen here.
                    self.is_asleep = not self._advance(now_s)
            if self.is_asleep:
                self._woken.wait()
                busy_s = monotonic()
            sleep(TICK_S)

    def _advance(self, now_s: float) -> bool:
        """Look once; return whether anything is in use."""
        shown: tuple[str, Phase] | None = None
        for connection, phase in list(self._phases.items()):
            self._phases[connection] = now = advanced(phase, connection, now_s)
            if now is not None and now.is_long:
                shown = connection.address or "this process", now
        wait = self._wait
        if wait is not None and (lasting := attrs.evolve(wait[1], seen_s=now_s)).is_long:
            shown = wait[0], lasting
        if shown is None:
            self._hide()
        else:
            self.is_showing = True
            self._screen.show(*shown)
        return wait is not None or any(phase is not None for phase in self._phases.values())

    def _hide(self) -> None:
        if self.is_showing:
            self.is_showing = False
            self._screen.hide()


_watchers: dict[type, Watcher] = {}


def watcher_of(screen: Screen) -> Watcher:
    """Return the process's watcher for a kind of screen."""
    return _watchers.setdefault(type(screen), Watcher(screen))


def clear_all() -> None:
    """Clear all screens."""
    for watcher in _watchers.values():
        watcher.clear()
