"""Nothing that handles bytes from the network can execute them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [
    ROOT / "djinn" / "wire",
    *(ROOT / "plugins" / "djinn_plugins" / room for room in ("common", "executor", "server", "transport")),
]
WIRE = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
BANNED_NAMES = {"torch.load", "torch.jit.load", "torch.export.load", "torch.package", "numpy.load", "np.load"}
BANNED_CALLS = {"eval", "__import__", "execfile"}
EXEC_ALLOWED = "plugins/djinn_plugins/executor/torch/codegen.py"
"""Compiles programs to Python from words of its own; its tests show that nothing from the wire gets into the text."""


def offences(tree: ast.AST, *, exec_allowed: bool = False) -> Iterator[str]:
    """Describe everything in a module that could execute data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)] if ast.unparse(node) in BANNED_NAMES else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            banned = BANNED_CALLS if exec_allowed else BANNED_CALLS | {"exec"}
            if node.func.id in banned:
                yield f"line {node.lineno} calls {node.func.id}"
            continue
        else:
            continue
        for name in names:
            if name.split(".")[0] in BANNED_MODULES or name in BANNED_NAMES:
                yield f"line {node.lineno} uses {name}"


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import os, marshal as m", "from shelve import open", "import dill",
    "import cloudpickle.fast", "torch.load(f)", "load = torch.load", "from torch import load", "eval('1')",
    "exec('1')", "def f():\n    import _pickle",
])
def test_the_check_catches_what_it_is_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_the_check_lets_ordinary_code_pass() -> None:
    source = "import json\nfrom torch import nn\nmodel.eval()\njson.loads('1')\nre.compile('x')"
    assert not list(offences(ast.parse(source)))


def test_the_modules_are_there() -> None:
    assert all(folder.is_dir() for folder in FOLDERS)
    assert len(WIRE) >= 2 * len(FOLDERS)


@pytest.mark.parametrize("path", WIRE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_of_the_wire_can_execute_what_it_reads(path: Path) -> None:
    allowed = str(path.relative_to(ROOT)) == EXEC_ALLOWED
    assert not list(offences(ast.parse(path.read_text()), exec_allowed=allowed))


def late_decoders(tree: ast.AST) -> Iterator[int]:
    """Find lines of functions that work out a structure's form: msgspec crashes if several threads do that at once.

    A module makes its decoders while it is imported, which one thread does.
    """
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    called = ast.unparse(node.func)
                    kinds = [word.value for word in node.keywords if word.arg == "type"]
                    if called.startswith("msgspec.") and (
                            called.endswith(".Decoder") or (called.endswith(".decode") and any(map(_is_new, kinds)))):
                        yield node.lineno


def _is_new(kind: ast.expr) -> bool:
    """Whether a type contains more than Python's own."""
    return not {name.id for name in ast.walk(kind) if isinstance(name, ast.Name)} <= {"dict", "list", "str", "Any"}


def test_decoders_are_made_while_their_module_is_imported() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for folder in ("djinn", "plugins")
             for path in sorted((ROOT / folder).rglob("*.py")) for line in late_decoders(ast.parse(path.read_text()))]
    assert found == []
    late = "def read(data):\n    return msgspec.json.decode(data, type=Row)"
    assert [*late_decoders(ast.parse(late)), *late_decoders(ast.parse(late.replace("Row", "dict[str, Any]")))] == [2]
