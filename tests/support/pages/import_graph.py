"""Draws who imports whom, for docs/architecture.md: ``python tests/support/pages/import_graph.py`` writes it there."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

__all__ = ("PAGE", "drawing", "imported", "imported_at_run_time", "kernel_imports", "layers_of", "page_with", "rooms")

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
_BEGIN, _END = "<!-- import graph: begin -->\n", "<!-- import graph: end -->\n"


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, also where only types are checked; ``from a import b`` counts as a and a.b."""
    return tuple(_imported(path))


@cache
def imported_at_run_time(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, except where only types are checked."""
    return tuple(_imported(path, types=False))


def _imported(path: Path, *, types: bool = True) -> Iterator[str]:
    for node in _statements(ast.parse(path.read_text()).body, types=types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} has a relative import in line {node.lineno}"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _statements(body: Iterable[ast.AST], *, types: bool) -> Iterator[ast.AST]:
    """All statements, also inside others; to look through expressions, too, takes three times as long."""
    for node in body:
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, inner, ()), types=types)


def kernel_imports() -> dict[str, set[str]]:
    """What each module of the kernel imports of the kernel, imports inside functions and for types included."""
    paths = sorted((ROOT / "djinn").rglob("*.py"))
    files = {str(path.relative_to(ROOT)).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
             for path in paths}
    found = {name: {each if each in files else each.rpartition(".")[0] for each in imported(path)}
             for name, path in files.items()}
    below = {name: names & {*files} - {name} for name, names in found.items()}
    # `from a import b` counts as an import of the module a.b, and not of a, if there is such a module.
    return {name: {each for each in names if not any(other.startswith(f"{each}.") for other in names)}
            for name, names in below.items()}


def layers_of(below: Mapping[str, set[str]]) -> dict[str, int]:
    """Number the layers from 1: a module is one above the highest that it imports.

    Raises:
        graphlib.CycleError: Modules import each other in a circle.
    """
    layers: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        layers[name] = 1 + max((layers[other] for other in below[name]), default=0)
    return layers


def rooms() -> dict[str, Path]:
    """The rooms of the plugins: their names and folders."""
    return {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/djinn_plugins/*/__init__.py"))}


def _rooms_import() -> dict[str, set[str]]:
    """What each room imports of other rooms; what it imports only for types does not count, as in the contracts."""
    found: dict[str, set[str]] = {"djinn": set()}
    for room, folder in rooms().items():
        names = {name for path in folder.rglob("*.py") for name in imported_at_run_time(path)}
        below = {name.split(".")[1] for name in names if name.startswith("djinn_plugins.")} & {*rooms()}
        found[room] = {"djinn", *below} - {room}
    return found


def _reduced(below: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out what follows: if a imports b and b imports c, a's import of c is not drawn."""
    reach: dict[str, set[str]] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        reach[name] = below[name].union(*(reach[other] for other in below[name]))
    return {name: {each for each in names if not any(each in reach[other] for other in names)}
            for name, names in below.items()}


def drawing() -> str:
    """The text between the page's markers: a Mermaid drawing of the rooms, and the layers of the kernel."""
    below = _reduced(_rooms_import())
    lines = ["```mermaid", "flowchart RL", "  djinn([djinn])"]
    lines += [f"  {name} --> {other}" for name, names in below.items() for other in sorted(names)]
    layers = layers_of(kernel_imports())
    lines += ["```", "", "| layer | modules of the kernel |", "|---|---|"]
    for number in range(max(layers.values()), 0, -1):
        modules = sorted(name for name, layer in layers.items() if layer == number)
        lines.append(f"| {number} | {', '.join(f'`{name}`' for name in modules)} |")
    return "\n".join(lines) + "\n"


def page_with(drawn: str, page: str) -> str:
    """The page with another drawing between its markers."""
    head, marker, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert marker, f"{PAGE.name} lacks the line {_BEGIN!r}"
    assert end, f"{PAGE.name} lacks the line {_END!r}"
    return f"{head}{_BEGIN}{drawn}{_END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page_with(drawing(), PAGE.read_text()))
