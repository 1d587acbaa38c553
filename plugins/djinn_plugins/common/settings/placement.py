"""The setting of placements. The plugin that opens several executors declares it."""

from __future__ import annotations

from typing import Literal

import attrs

from djinn.settings import setting

__all__ = ("PlacementSettings",)


@attrs.frozen
class PlacementSettings:
    """Where operations run."""

    placement: Literal["explicit", "automatic", "cost", "phases"] = setting(
        "explicit", help="`explicit`: each executor is a device, and you place tensors; `automatic`: all are one, and "
                         "a scheduler decides; `cost`: it also leaves small work here; `phases`: prompts run elsewhere")
