"""Plugins: finding them, checking them, choosing among them."""

from __future__ import annotations

from djinn.plugins.in_process import register
from djinn.plugins.manager import Plugins, Registered, installed
from djinn.settings.selection import DEFAULTS, KINDS, PluginSelection

__all__ = ("DEFAULTS", "KINDS", "PluginSelection", "Plugins", "Registered", "installed", "register")
