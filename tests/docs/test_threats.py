"""The page of threats names tests that exist, for each threat."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line.split(" | ") for line in (ROOT / "docs" / "threats.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| threat")]


def test_every_threat_has_an_answer_and_a_test() -> None:
    assert len(ROWS) == 31
    for row in ROWS:
        assert len(row) == 3, row
        assert re.findall(r"`tests/[\w/]+\.py::test_\w+`", row[2]), row


def test_every_test_that_is_named_exists() -> None:
    named = [found for row in ROWS for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])]
    assert len(named) > 30
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{function}"
