"""Loads djinn with ``import torch``, and enters the mode that the environment names."""

from __future__ import annotations

import os

__all__ = ("load",)


def load() -> None:
    """Register the device, and enter the mode that ``DJINN_RUN_AS`` names, if any.

    It may be called by the ``import torch`` with which `djinn` itself begins. Then `djinn` is in ``sys.modules`` and
    still empty, but its modules can be imported.

    Raises:
        DjinnError: A plugin is missing or broken, or a setting has an invalid value.
    """
    import djinn  # noqa: F401  # registers the device, unless that is what goes on now

    mode = os.environ.get("DJINN_RUN_AS", "")
    if not mode:
        return
    from djinn.plugins import DEFAULTS, Plugins
    from djinn.session import runtime
    from djinn_plugins.run.running import begin, choose

    plugins = Plugins.configured({}, os.environ)
    runtime.install(plugins.choose("interceptor", DEFAULTS["interceptor"]))
    begin(choose(plugins, mode))
