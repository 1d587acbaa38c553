"""Imports what processes that judge samples import: for the interpreter that they are forked from."""

from __future__ import annotations

from support.processes.begun import begin_session, import_begun

from djinn.plugins import Plugins
from djinn_conformance import database, workers
from djinn_conformance.seeding import quietly

__all__ = ("workers",)

database.operators()
with quietly():  # which imports the rest of what a sample needs
    Plugins.load()
import_begun(begin_session)
