"""Imports what ``djinn serve`` imports, plugins included: for the interpreter that servers of tests are forked from."""

from __future__ import annotations

import djinn_server.opening
import djinn_server.server
import djinn_server.worker
from djinn_cli.app import build

import djinn
from djinn.plugins import Plugins

__all__ = ("djinn", "djinn_server")

build({})
Plugins.load()
