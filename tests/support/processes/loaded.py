"""Imports what ``djinn serve`` and sessions import, plugins included: for the interpreter that both are forked from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from support.processes.begun import begin_session, import_begun

import djinn
import djinn_plugins.server.opening
import djinn_plugins.server.server
import djinn_plugins.server.worker
from djinn.plugins import Plugins
from djinn_plugins.cli.app import build
from djinn_plugins.server.forkserver import fork_forkserver, prepare
from djinn_plugins.server.spawning import ForkServer

__all__ = ("djinn", "djinn_plugins")


def _forked(environment: Mapping[str, str]) -> ForkServer | None:
    """Fork what a server starts as a new process if it has been given a secret, so that workers do not have it.

    That takes seconds of a processor. For tests that look for the secret, ``STARTS_FORKSERVER`` is set.
    """
    if os.environ.get("STARTS_FORKSERVER"):
        return _start(environment)

    def begin() -> None:
        os.environ.clear()
        os.environ.update(environment)
        prepare(Plugins.configured({}, os.environ, "server"))

    return fork_forkserver(begin)


for _name in ("djinn_plugins.common.net.parents", "djinn_plugins.watch.progress.screens",
              "djinn_plugins.server.signals",
              "djinn_plugins.transport.tcp.client", "djinn_plugins.transport.tcp.listener"):
    import_module(_name)  # what a server imports when it begins, and the client of one
build({})
Plugins.load()
import_begun(begin_session)
_start = djinn_plugins.server.opening.start_forkserver
djinn_plugins.server.opening.start_forkserver = _forked
