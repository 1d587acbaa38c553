"""The laws of `djinn serve` and of settings name tests that are there, and each law is well formed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAWS: list[dict[str, Any]] = [law for kind in ("server", "settings")
                              for law in tomllib.loads((ROOT / f"specs/{kind}.toml").read_text())["laws"]]


def _tests_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law["id"])
def test_a_law_is_one_sentence_and_its_tests_are_there(law: dict[str, Any]) -> None:
    assert set(law) == {"id", "statement", "shown_by"}
    assert re.fullmatch(r"(server|settings)\.[a-z_]+", law["id"])
    assert law["statement"].endswith(".")
    assert law["shown_by"]
    for named in law["shown_by"]:
        file, _, test = named.partition("::")
        assert test in _tests_in(ROOT / "tests" / file), named


def test_laws_have_names_of_their_own() -> None:
    assert len({law["id"] for law in LAWS}) == len(LAWS)
