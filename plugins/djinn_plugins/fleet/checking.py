"""What settings ask of several executors, and they cannot do."""

from __future__ import annotations

from djinn.errors import ConfigurationError
from djinn.settings import Config, Settings
from djinn.settings.core import CacheSettings
from djinn_plugins.common.settings.placement import PlacementSettings

__all__ = ("NAME", "check", "no_results_kept")

NAME = "fleet"


def check(settings: Settings) -> None:
    """Refuse ``placement="phases"`` for one server, and results that are kept on several.

    Raises:
        ConfigurationError: The settings ask for one of these.
    """
    config = settings(Config)
    if settings(PlacementSettings).placement == "phases" and len(config.addresses) < 2:
        raise ConfigurationError(
            "placement='phases' reads prompts on other servers than the first, and there is only one.",
            hint="Name several: djinn.init(servers=['tcp://first:7070', 'tcp://second:7070'], placement='phases').")
    is_fleet = len(config.addresses) > 1 or config.plugins.chosen.get("backend") == NAME
    if is_fleet and settings(CacheSettings).result_cache_bytes:
        raise no_results_kept()


def no_results_kept() -> ConfigurationError:
    """Return the error of a session with several executors that is to keep results."""
    return ConfigurationError("Results are kept by sessions with one executor only.",
                              hint="Leave result_cache_bytes out, or connect to one server.")
