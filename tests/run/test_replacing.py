"""Functions of libraries are replaced when a program imports them, and come back; an import never fails by it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djinn_plugins.run.replacing import Replacement, replaced
from djinn_plugins.run.report import RunReport

MODULES = {
    "closed/__init__.py": "",
    "closed/lists.py": "def choose(): return 'cpu'\nclass Trainer:\n    def place(self): return choose()\n",
    "closed/users.py": "from closed.lists import choose as chosen\ndef run(): return chosen()\n",
    "closed/broken.py": "raise OSError('no')\n",
}
REPLACEMENTS = (Replacement("closed.lists", "choose", lambda original: lambda: f"not {original()}"),
                Replacement("closed.lists", "Trainer.place", lambda original: lambda self: original(self).upper()))


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "closed").mkdir()
    for name, source in MODULES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "closed"]:
        del sys.modules[name]


def load(name: str) -> Any:
    return importlib.import_module(f"closed.{name}")


@pytest.mark.parametrize("before", [False, True], ids=["imported later", "imported before"])
def test_a_function_is_replaced_in_all_modules_that_have_it_and_comes_back(before: bool) -> None:
    if before:
        load("users")
    finders = list(sys.meta_path)
    with replaced(REPLACEMENTS, RunReport()):
        if not before:
            assert "closed" not in sys.modules
        assert (load("users").run(), load("lists").choose(), load("lists").Trainer().place()) == (
            "not cpu", "not cpu", "NOT CPU")
        assert "exec_module" not in vars(load("lists").__loader__)
    assert (load("users").run(), load("lists").choose(), load("lists").Trainer().place()) == ("cpu", "cpu", "cpu")
    assert sys.meta_path == finders


def test_what_a_library_does_not_have_is_reported_and_the_import_goes_on() -> None:
    report = RunReport()
    with replaced([Replacement("closed.lists", "missing", lambda original: original), *REPLACEMENTS], report):
        assert load("lists").choose() == "not cpu"
    (problem,) = report.problems
    assert problem.startswith("closed is of a release that djinn does not know (closed.lists: KeyError: 'missing')")


def test_an_import_that_fails_fails_as_without() -> None:
    with replaced([Replacement("closed.broken", "choose", lambda original: original)], RunReport()):
        with pytest.raises(OSError, match="no"):
            load("broken")
        with pytest.raises(ModuleNotFoundError):
            load("absent")


def test_other_changes_are_made_and_taken_back() -> None:
    def change(module: Any) -> Any:
        module.registry = ["djinn"]
        return module.registry.clear

    with replaced([], RunReport(), [("closed.lists", change)]):
        registry = load("lists").registry
        assert registry == ["djinn"]
    assert registry == []
