"""The tested subjects: objects that plugins registered, found through the plugin manager only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from functools import cache

import attrs
import torch

from djinn.errors import PluginError
from djinn.plugins import Plugins, PluginSelection, Registered, installed
from djinn_conformance import specs
from djinn_conformance.certificates import can_be_made

__all__ = ("SelectionError", "Subject", "default_plugins", "installed_plugins", "select")


class SelectionError(ValueError):
    """``--djinn-plugin`` does not match anything testable."""


@attrs.frozen(repr=False)
class Subject:
    """One registered object, and for an executor one of its devices."""

    registered: Registered
    device: str = ""

    @property
    def kind(self) -> str:
        """Its kind."""
        return self.registered.kind

    def __repr__(self) -> str:
        named = f"{self.registered.plugin}:{self.registered.name}"
        return f"{named}@{self.device}" if self.device else named


def installed_plugins() -> tuple[Plugins, list[PluginError]]:
    """Load all installed plugins that the environment does not disable, and return the errors of broken ones."""
    problems: list[PluginError] = []
    selection = PluginSelection.parse(os.environ.get("DJINN_PLUGINS", ""))
    return Plugins.load(PluginSelection(selection.disabled), problems=problems), problems


def default_plugins() -> Plugins:
    """Return all installed plugins that work, loaded once in a process: for what many examples need of them."""
    return _loaded_once(os.environ.get("DJINN_PLUGINS", ""))


@cache
def _loaded_once(_: str) -> Plugins:
    return installed_plugins()[0]


def select(name: str | None, plugins: Plugins, problems: Iterable[PluginError] = ()) -> list[Subject]:
    """Choose the subjects to test.

    Args:
        name: A plugin's entry point, the name of a registered object, or either after ``kind:``; ``None`` for
            everything.
        plugins: The installed plugins.
        problems: Errors of plugins that could not be loaded.

    Returns:
        The subjects; empty if the name is that of a plugin which registers nothing that has laws.

    Raises:
        SelectionError: Nothing has that name, or a plugin that may be meant is broken.
    """
    known = [entry for kind in specs.kinds() for entries in plugins.registered(kind).values() for entry in entries]
    broken = [str(problem) for problem in problems]
    if name is None:
        if broken:
            raise SelectionError("\n".join(broken))
        chosen = known
    else:
        kind, _, last = name.rpartition(":")
        chosen = [entry for entry in known if last in (entry.name, entry.plugin) and kind in ("", entry.kind)]
    if not chosen and not (name in installed() and not broken):
        listed = "\n".join(f"  {entry.kind}:{entry.name}  of {entry.plugin} ({entry.distribution})" for entry in known)
        faults = "".join(f"\nNot loaded: {problem}" for problem in broken)
        raise SelectionError(
            f"--djinn-plugin={name}: no plugin and no registered object is called so.\n"
            f"There are:\n{listed or '  none'}{faults}\nName one of them as NAME, as kind:NAME, or by its plugin.")
    return [subject for entry in chosen for subject in _subjects(entry)]


def _subjects(entry: Registered) -> list[Subject]:
    if getattr(entry.value, "encrypts", False) and not can_be_made():
        warnings.warn(f"{entry.name} of {entry.plugin} is left out: it encrypts, and trustme is not installed",
                      stacklevel=2)
        return []
    if entry.kind != "executor":
        return [Subject(entry)]
    best: dict[str, str] = {}
    for device in entry.value.devices():
        best.setdefault(device.partition(":")[0], device)
    return [Subject(entry, device) for device in best.values()] or [Subject(entry)]


def torch_device(subject: Subject) -> torch.device:
    """Return the device of the eager reference for an executor: its own device, if PyTorch supports it directly."""
    try:
        device = torch.device(subject.device)
        torch.empty((), device=device)
    except (RuntimeError, NotImplementedError, AssertionError):
        return torch.device("cpu")
    return device
