"""Kubernetes without Kubernetes: a stand-in for kubectl, as ``PATH`` finds it, and events."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ("Kubernetes",)

_COMMANDS = Path(__file__).with_name("kubernetes_commands.py")


class Kubernetes:
    """A folder with the command, and the objects.

    Args:
        folder: Where they are.

    Attributes:
        path: The value of ``PATH`` with which the command is found.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cluster"
        (self._folder / "pods").mkdir(parents=True)
        commands = folder / "bin"
        commands.mkdir()
        words = [sys.executable, "-S", "-E", str(_COMMANDS), str(self._folder)]
        (commands / "kubectl").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (commands / "kubectl").chmod(0o755)
        self.path = f"{commands}{os.pathsep}{os.environ['PATH']}"

    def objects(self) -> dict[tuple[str, str], Any]:
        """The objects that there are, Pods included, by kind and name."""
        found = [json.loads(path.read_text()) for path in (
            *self._folder.glob("*-*.json"), *self._folder.glob("pods/*/object"))]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    @contextmanager
    def during(self, event: str) -> Iterator[None]:
        """While no node has room (``held``), or while the server does not answer (``silent``)."""
        (self._folder / event).touch()
        try:
            yield
        finally:
            (self._folder / event).unlink()

    def fail_node(self) -> None:
        """Kill the first process of each Pod."""
        for path in self._folder.glob("pods/*/pid"):
            os.kill(int(path.read_text()), signal.SIGKILL)
