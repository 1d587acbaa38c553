"""Objects that the configuration chooses: each must exist, and a choice without effect is logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from djinn.kinds.backend import PluginRegistry

__all__ = ("check_choices",)

_log = logging.getLogger("djinn.plugins")


def check_choices(plugins: PluginRegistry, idle: Mapping[str, str]) -> None:
    """Check what the configuration chooses.

    Args:
        plugins: The plugins, with their selection.
        idle: Kinds of which a choice has no effect here, each with the reason.

    Raises:
        PluginError: A chosen object of another kind does not exist.
        AmbiguousPluginError: Two plugins registered its name.
    """
    for kind, name in plugins.selection.chosen.items():
        if kind in idle:
            _log.warning("the setting plugins chooses %s=%s, which has no effect here: %s", kind, name, idle[kind])
        else:
            plugins.choose(kind)
