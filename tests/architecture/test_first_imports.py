"""Each package can be what a process imports first: no circle of imports that only one order shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.processes.warm import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
PLUGINS = Path(__file__).parents[2] / "plugins"
PACKAGES = [".".join(path.parent.relative_to(PLUGINS).parts) for path in sorted(PLUGINS.rglob("__init__.py"))
            if "import" in path.read_text()]
# Each name is imported in a fork of a process that has imported only what djinn imports of others.
PROGRAM = """
import importlib, os, sys, traceback, warnings
import anyio, attrs, msgspec, pluggy, torch, typer.main

def succeeds(name):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        warnings.simplefilter("error")  # a device that cannot be set up is a warning
        importlib.import_module(name)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

print(*(name for name in sys.argv[1:] if not succeeds(name)))
"""


def not_importable_first(names: list[str], path: Path | None = None) -> tuple[list[str], str]:
    """Return which modules cannot be imported first, and why."""
    done = run_python(PROGRAM, *names, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_a_circle_that_only_one_order_shows_is_found(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("import second\nname = 1\n")
    (tmp_path / "second.py").write_text("from first import name\n")
    assert not_importable_first(["second", "first"], tmp_path)[0] == ["first"]


def test_each_package_can_be_imported_first() -> None:
    failed, why = not_importable_first(PACKAGES)
    assert not failed, why


def test_each_module_that_djinn_itself_needs_can_be_imported_first() -> None:
    """`import djinn` sets up the device: if that is what imports a module first, djinn needs the module half-made."""
    needed = run_python("import sys, djinn; print(*(name for name in sys.modules if 'djinn_plugins.' in name))")
    assert "djinn_plugins.common.operators.operators" in needed.stdout.split()
    failed, why = not_importable_first(needed.stdout.split())
    assert not failed, why
