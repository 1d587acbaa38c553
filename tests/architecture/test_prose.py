"""Docstrings, docs and specs are plain English: phrases that make a sentence hard to read are rare."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages.sources import files_in

ROOT = Path(__file__).parents[2]
MAX_PER_THOUSAND = 1.0
"""Of words. Docstrings of pytest have 0.2, those of transformers 0.4."""
_IDIOM = re.compile(
    r"\bnobody (names|wants|asks|needs|knows|uses)|\blets? (it |them |him )?go\b|\b(is|are|was|were|be) told\b"
    r"|\btell(s|ing)? (it|them|him|of)\b|\bgo(es)? on\b|\bgo(es)? by\b|\bwho(so)?ever\b|\bwhatever\b"
    r"|\bwhat (is|was|are|were|has|had|it|they|nobody|comes|goes|travels|waits|may|must|can)\b|\bthose who\b"
    r"|\bhe who\b|\bon (its|their) way\b|\bin turns\b|\bfrom now on\b|\bby itself\b|\bof (its|their) own\b"
    r"|\bwithout further ado\b|\bso (many|much) as\b|\bLearn (that|of|what|how)\b|\bbring(s|ing)? home\b"
    r"|\bc(o|a)mes? home\b|\bat home\b", re.IGNORECASE)

_NAMELESS = re.compile(r"\b(some|any|every|no)body\b|\bsomeone\b|\bwho(so)?ever\b|\bthose who\b|\bwho asks\b",
                       re.IGNORECASE)
"""Actors without names: a reader has to guess which part of the system is meant."""


def texts(folder: Path) -> Iterator[str]:
    """Every docstring, and every page without its code."""
    for path in files_in(folder, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""
    for path in files_in(folder, ".md"):
        yield re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for path in files_in(folder, ".toml"):
        yield " ".join(re.findall(r"(?m)^\s*#\s?(.*)$", path.read_text()))
        yield from values_of(tomllib.loads(path.read_text()))


def values_of(entry: Any) -> Iterator[str]:
    """All texts in a table, without line breaks."""
    if isinstance(entry, str):
        yield " ".join(entry.split())
    elif isinstance(entry, list | dict):
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from values_of(part)


@pytest.mark.parametrize("folder", ["djinn", "plugins", "conformance", "docs", "specs"])
def test_idiom_is_rare(folder: str) -> None:
    words, found = 0, []
    for text in texts(ROOT / folder):
        words += len(re.findall(r"\w+", text))
        found += [text[max(0, match.start() - 40):match.end() + 40] for match in _IDIOM.finditer(text)]
    assert 1000 * len(found) / words <= MAX_PER_THOUSAND, "\n".join(found)


@pytest.mark.parametrize("folder", ["djinn", "plugins", "conformance"])
def test_docstrings_name_who_acts(folder: str) -> None:
    found = []
    for path in files_in(ROOT / folder, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            # A string that is a statement is a docstring, if only that of an attribute.
            if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                    and isinstance(text := node.value.value, str)):
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {match.group()}"
                          for match in _NAMELESS.finditer(text)]
    assert not found, "\n".join(found)
