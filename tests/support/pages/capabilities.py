"""Writes docs/capabilities.md from specs/capabilities.toml: ``python tests/support/pages/capabilities.py``."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ("PAGE", "groups", "list_tests", "names", "page", "rows")

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "capabilities.md"
_HEAD = """# What earlier documents promise

Each row is a capability that the documents of earlier versions name, with the tests that show it here; names with a dot
are laws of [specs/](../specs), which hold for each plugin of a kind. Where something else stands in a place, the
row says what, and why. The [code of those documents](earlier.md) runs as a test, too.

This page is generated from [specs/capabilities.toml](../specs/capabilities.toml), and CI checks that each test and each
law exists: `python tests/support/pages/capabilities.py` writes it.
"""
_NAMES = """
## Names

`djinn.NAME` exists for each of them, and [the module's page](api.md) describes it. The test
`tests/graph/test_earlier_names.py::test_every_name_of_an_earlier_module_is_there` imports those of
earlier modules.

| topic | names |
|---|---|
"""


def _specification() -> dict[str, Any]:
    return tomllib.loads((ROOT / "specs" / "capabilities.toml").read_text())


def groups() -> list[dict[str, Any]]:
    """The groups of rows, as they are in the file."""
    found: list[dict[str, Any]] = _specification()["groups"]
    return found


def rows() -> list[dict[str, Any]]:
    """All rows."""
    return [row for group in groups() for row in group["rows"]]


def names() -> list[dict[str, Any]]:
    """The public names by topic."""
    found: list[dict[str, Any]] = _specification()["names"]
    return found


@cache
def list_tests(file: str) -> set[str]:
    """The tests of a file."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def page() -> str:
    """The text of the page."""
    lines = [_HEAD]
    for group in groups():
        lines += [f"## {group['title']}", "", "| | capability | shown by | instead |", "|---|---|---|---|"]
        for row in group["rows"]:
            shown = "<br>".join(f"`{each.removeprefix('tests/')}`" for each in row["shown_by"])
            lines.append(f"| {row['id']} | {row['name']} | {shown} | {row.get('instead', '')} |")
        lines.append("")
    lines[-1:] = [_NAMES.rstrip("\n")]
    lines += [f"| {each['topic']} | {', '.join(f'`{name}`' for name in each['names'])} |" for each in names()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
