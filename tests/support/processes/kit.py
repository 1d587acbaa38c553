"""Imports what each run of the conformance kit imports first: for the interpreter that such runs are forked from.

Nothing else: Hypothesis draws its examples by what the loaded modules contain.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from support.processes.examples import prepare

from djinn.plugins import Plugins
from djinn_conformance import capabilities, compositions, harness, laws, seeding, serving, specs, subjects, tally

__all__ = ("capabilities", "compositions", "harness", "laws", "seeding", "serving", "specs", "subjects", "tally")

Plugins.load()
import_module("_hypothesis_pytestplugin")  # which warns if it is imported after something was drawn
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # to Hypothesis, this is a plugin that is loaded slowly
    prepare()
