"""The setting of the plugin."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("ProgressSettings",)


@attrs.frozen
class ProgressSettings:
    """Whether progress is shown."""

    progress: bool = setting(
        True, help="show on a terminal, or in a notebook, what takes longer than a second: transfers, results, servers")
