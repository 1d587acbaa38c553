"""Shows waits before there is a connection: for a server that starts, or has no room."""

from __future__ import annotations

from collections.abc import Mapping

from djinn.settings import Settings
from djinn_plugins.common.net.waits import use_listener
from djinn_plugins.watch.progress.settings import ProgressSettings

__all__ = ("ProgressObserver",)


class ProgressObserver:
    """Clears the display when a session reports its counters; see `djinn.kinds.Observer`."""

    name = "progress"

    def use_settings(self, settings: Settings) -> None:
        """Show waits, or stop that, as the settings and the process's standard error say."""
        from djinn_plugins.watch.progress.screens import screen_here

        screen = screen_here() if settings(ProgressSettings).progress else None
        if screen is None:
            use_listener(None)
            return
        from djinn_plugins.watch.progress.watcher import watcher_of

        use_listener(watcher_of(screen))

    def observe(self, stats: Mapping[str, int]) -> None:
        """Clear the screen: the session waits for nothing more."""
        from djinn_plugins.watch.progress.watcher import clear_all

        clear_all()
