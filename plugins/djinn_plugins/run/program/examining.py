"""What ``djinn doctor`` says of loading djinn with PyTorch and of run modes."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from djinn.errors import PluginError
from djinn.plugins import Plugins
from djinn.settings.resolved import selection_of
from djinn_plugins.autoload import wanted

__all__ = ("autoloading", "modes")


def autoloading() -> tuple[str, str]:
    """Say whether ``import torch`` loads djinn, and what to do if it does not."""
    if not any(entry.value.startswith("djinn_plugins.autoload:") for entry in entry_points(group="torch.backends")):
        return ("does not load djinn: the entry point torch.backends is missing",
                "Install djinn-torch again; until then, import djinn in programs, or use `djinn run`.")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return ("does not load djinn: TORCH_DEVICE_BACKEND_AUTOLOAD switches all backends off",
                "Unset it, import djinn in programs, or use `djinn run`.")
    if not wanted():
        return ("does not load djinn here", "Set DJINN_SERVER or DJINN_AUTOLOAD=1, or use `djinn run`.")
    return "loads djinn", ""


def modes() -> tuple[str, str]:
    """List the modes of ``djinn run``."""
    problems: list[PluginError] = []
    plugins = Plugins.load(selection_of({}, os.environ), problems=problems)
    found = ", ".join(sorted(plugins.registered("mode")))
    return (found, "") if found else ("none", "Switch djinn-mode-accelerator on again, or install another.")
