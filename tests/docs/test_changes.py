"""CHANGELOG.md says what 0.1.0 is; changes from then on are fragments that towncrier collects."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "changes"
TYPES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["fragment"]
MAX_WORDS = 80
MAX_LINES = 40
"""Of the part of 0.1.0: later changes are fragments."""


def mistakes_in(name: str, text: str) -> list[str]:
    """Say what is wrong with a fragment."""
    lost = [link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text) if not (ROOT / link).exists()]
    return [mistake for mistake, is_made in {
        f"is not named NUMBER.TYPE.md or +WORDS.TYPE.md, with a type of {', '.join(TYPES)}":
            not re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(TYPES)})\.md", name),
        "is not one paragraph of full sentences": not re.fullmatch(r"[^\s#*-](.|\n(?!\n))*\.\n", text),
        f"has more than {MAX_WORDS} words": len(text.split()) > MAX_WORDS,
        "has links that lead nowhere from CHANGELOG.md": bool(lost),
    }.items() if is_made]


def test_fragments_have_a_name_and_a_text_that_towncrier_can_use() -> None:
    fragments = [path for path in FOLDER.iterdir() if path.name != "README.md"]
    found = {path.name: mistakes_in(path.name, path.read_text()) for path in fragments}
    assert not {name: mistakes for name, mistakes in found.items() if mistakes}


@pytest.mark.parametrize(("name", "text", "mistakes"), [
    ("44.changed.md", "`--x` is called `--y`,\nsee [the server](docs/server.md#limits).\n", 0),
    ("+many-names.added.md", "There is `--x`.\n", 0),
    ("44.md", "There is `--x`.\n", 1),
    ("names.added.md", "There is `--x`.\n", 1),
    ("44.improved.md", "There is `--x`.\n", 1),
    ("44.added.md", "- There is `--x`.\n", 1),
    ("44.added.md", "There is `--x`\n", 1),
    ("44.added.md", "There is `--x`.\n\nThere is `--y`.\n", 1),
    ("44.added.md", "Words, " * MAX_WORDS + "and words.\n", 1),
    ("44.added.md", "There is [a page](server.md).\n", 1),
])
def test_mistakes_in_a_fragment_are_found(name: str, text: str, mistakes: int) -> None:
    assert len(mistakes_in(name, text)) == mistakes


def test_what_0_1_0_is_has_the_headings_of_the_index_and_forty_lines() -> None:
    _, _, part = (ROOT / "CHANGELOG.md").read_text().partition("\n## 0.1.0")
    index = (ROOT / "docs" / "index.md").read_text()
    assert re.findall(r"(?m)^### (.*)$", part) == re.findall(r"(?m)^(?:## )?(To .*?):?$", index)
    assert len(part.splitlines()) <= MAX_LINES
