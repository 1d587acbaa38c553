"""The kernel stays small, names no operator, and every module follows the rules of the house."""

from __future__ import annotations

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest
from support.pages.import_graph import PAGE, drawing, imported, kernel_imports, layers_of, page_with

ROOT = Path(__file__).parents[2]
KERNEL = sorted((ROOT / "djinn").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
CONFORMANCE = sorted((ROOT / "conformance" / "djinn_conformance").rglob("*.py"))
MODULES = [*KERNEL, *PLUGINS, *CONFORMANCE]
IMPORT_ROOTS = (ROOT, ROOT / "plugins", ROOT / "conformance")

MAX_KERNEL_LINES = 3_450
"""All of it counts. The limit may only fall."""
MAX_LAYERS = 12
MAX_MODULE_LINES = 400
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
            tokenize.ENDMARKER)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_short(source: str) -> bool:
    """Whether a module has at most as many lines of code as one may have; most have so few lines of any kind."""
    return len(source.splitlines()) <= MAX_MODULE_LINES or code_lines(source) <= MAX_MODULE_LINES


@cache
def code_lines(source: str) -> int:
    """Count the lines that hold code: no blank ones, no comments, no docstrings."""
    described: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            described.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - described)


def test_lines_are_counted_as_they_should_be() -> None:
    source = (
        '"""Doc."""\n\n# comment\nx = (1,  # why\n     2)\n"""What x is."""\n\n\n'
        'def f():\n    """Doc\n\n    more."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 5


def test_the_kernel_is_small() -> None:
    lines = {name_of(path): code_lines(path.read_text()) for path in KERNEL}
    longest = sorted(lines.items(), key=lambda item: -item[1])[:8]
    assert sum(lines.values()) <= MAX_KERNEL_LINES, f"{sum(lines.values())} lines, the longest are {longest}"


def test_modules_of_the_kernel_import_each_other_downwards_in_few_layers() -> None:
    """Imports inside functions and for types count, too."""
    layer = layers_of(kernel_imports())
    assert max(layer.values()) <= MAX_LAYERS, sorted(layer.items(), key=lambda item: -item[1])[:12]


def test_a_circle_of_imports_is_found() -> None:
    with pytest.raises(graphlib.CycleError):
        layers_of({"a": {"b"}, "b": {"a"}})
    assert layers_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}


def test_the_picture_of_the_imports_is_up_to_date() -> None:
    page = PAGE.read_text()
    hint = "python tests/support/pages/import_graph.py writes it"
    assert page == page_with(drawing(), page), hint


def test_each_module_can_be_read_at_one_sitting() -> None:
    assert [name_of(path) for path in MODULES if not is_short(path.read_text())] == []


def test_the_kernel_names_no_operator() -> None:
    named = [f"{name_of(path)}:{number}" for path in KERNEL
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"\baten\b|\btorch\.ops\.[a-z]", line)]
    assert named == []


def test_nobody_outside_of_the_kernel_uses_its_private_modules() -> None:
    private = {name_of(path): name for path in (*PLUGINS, *CONFORMANCE) for name in imported(path)
               if name.startswith("djinn.") and any(part.startswith("_") for part in name.split("."))}
    assert private == {}


_PROGRAMS_OF_THEIR_OWN = re.compile(
    r"plugins/djinn_plugins/(server|cluster|cli|watch/(monitor|dashboard)|common/dashboard)/")
"""Rooms and plugins whose code mainly runs in a process of djinn's own."""


def test_programs_can_replace_the_clock_without_replacing_djinns() -> None:
    """A program that replaces ``time.perf_counter`` by a fixed sequence needs all of it for itself."""
    found = [name_of(path) for path in (*KERNEL, *PLUGINS)
             if not _PROGRAMS_OF_THEIR_OWN.match(name_of(path))
             and any(isinstance(node, ast.Import) and any(alias.name == "time" for alias in node.names)
                     for node in ast.walk(ast.parse(path.read_text())))]
    assert not found, f"{found}: bind functions of `time` at import, by `from time import ...`"


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def declared(requirements: list[str]) -> set[str]:
        names = {re.split(r"[\[<>=!~ ;]", requirement)[0].lower() for requirement in requirements}
        return {name.replace("-", "_") for name in names} | ({"attr"} if "attrs" in names else set())

    always = declared(project["dependencies"])
    extras = {name: declared(requirements) for name, requirements in project["optional-dependencies"].items()}
    allowed = {"djinn_plugins.cli.demo": always | extras["demo"], "djinn_conformance": always | extras["conformance"],
               "djinn_plugins.watch.monitor": always | extras["metrics"],
               "djinn_plugins.server.prometheus": always | extras["metrics"],
               "djinn_plugins.server": always | extras["tls"],
               "djinn_plugins.common.dashboard": always | extras["dashboard"],
               "djinn_plugins.cluster.ray": always | extras["ray"]}
    own = {"djinn", "djinn_plugins", "djinn_conformance"}
    undeclared = {}
    for path in MODULES:
        module = ".".join(path.relative_to(ROOT).parts[0 if path in KERNEL else 1:])
        found = {name.split(".")[0] for name in imported(path)} - own - sys.stdlib_module_names
        # NumPy is asked for where PyTorch would ask for it, and PyTorch can do without.
        missing = found - next((names for package, names in allowed.items() if module.startswith(f"{package}.")),
                               always | extras["numpy"])
        if missing:
            undeclared[name_of(path)] = sorted(missing)
    assert not undeclared


def test_who_imports_whom_follows_the_contracts() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", "tests/architecture/imports.toml"], cwd=ROOT,
        capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": ":".join(map(str, IMPORT_ROOTS)), "PATH": "", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_of_the_kernel_do_not_import_each_other_in_a_circle() -> None:
    packages: dict[str, set[str]] = {}
    for name, imports in kernel_imports().items():
        package = ".".join(name.split(".")[:2])
        others = {".".join(each.split(".")[:2]) for each in imports}
        packages.setdefault(package, set()).update(others - {package, "djinn"})
    layers_of({package: others for package, others in packages.items() if package != "djinn"})


def test_no_two_public_classes_have_the_same_name() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for name in re.findall(r"(?m)^class ([A-Za-z]\w*)", path.read_text()):
            found.setdefault(name, []).append(name_of(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_tests_can_be_read_at_one_sitting_and_their_support_is_in_packages() -> None:
    modules = sorted((ROOT / "tests").rglob("*.py"))
    assert [name_of(path) for path in modules if not is_short(path.read_text())] == []
    assert list((ROOT / "tests" / "support").glob("*.py")) == []
