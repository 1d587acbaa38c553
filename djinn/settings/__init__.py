"""Settings, of the kernel and of plugins: declared once, with types, and resolved from several sources."""

from __future__ import annotations

from djinn.settings.core import Config
from djinn.settings.declared import Declarations, Setting, setting
from djinn.settings.resolved import Settings
from djinn.settings.selection import DEFAULTS, KINDS, PluginSelection

__all__ = ("DEFAULTS", "KINDS", "Config", "Declarations", "PluginSelection", "Setting", "Settings", "setting")
