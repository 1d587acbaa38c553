"""Logging by component."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinn.settings import Config


def configure(config: Config) -> None:
    """Apply the configured level to all djinn loggers, or to those of some components.

    The application sets up handlers; without any, Python prints warnings to standard error.
    """
    for component in map(str.strip, config.log_component.split(",")):
        logging.getLogger(f"djinn.{component}".removesuffix(".")).setLevel(config.log_level)
