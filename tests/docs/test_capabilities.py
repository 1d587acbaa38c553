"""The page of capabilities is what its specification says, and everything that it names exists."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.pages.capabilities import PAGE, list_tests, names, page, rows

import djinn

ROOT = Path(__file__).parents[2]
LENGTHS = {"T": 14, "S": 4, "G": 6, "M": 8, "P": 9, "E": 13}
"""How many rows there are of each kind; nothing is dropped."""


@cache
def _laws() -> set[str]:
    return {law["id"] for path in (ROOT / "specs").rglob("*.toml")
            for law in tomllib.loads(path.read_text()).get("laws", []) if isinstance(law, dict)}


def test_the_page_is_what_its_specification_says() -> None:
    assert PAGE.read_text() == page(), "python tests/support/pages/capabilities.py writes it"


def test_nothing_is_dropped() -> None:
    assert [row["id"] for row in rows()] == [f"{kind}{number}" for kind, count in LENGTHS.items()
                                             for number in range(1, count + 1)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_a_row_is_shown_by_tests_that_exist(row: dict[str, Any]) -> None:
    assert row.keys() <= {"id", "name", "shown_by", "instead"}
    assert row["shown_by"]
    for shown in row["shown_by"]:
        file, _, test = shown.partition("::")
        assert test in list_tests(file) if test else shown in _laws(), shown
    if "instead" in row:
        assert re.search(r"\]\([\w/]+\.md", row["instead"]), "a page says more"


def test_each_name_exists_and_is_public() -> None:
    listed = [name for each in names() for name in each["names"]]
    assert len(listed) == len(set(listed)) > 50
    assert not set(listed) - set(djinn.__all__)
    for name in listed:
        assert getattr(djinn, name) is not None
