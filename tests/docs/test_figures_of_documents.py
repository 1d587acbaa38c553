"""The tables of docs/documents.md are what was measured, and none has a row that is not filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.reports import documents, generated_part


def measured(tmp_path: Path, **changed: object) -> Path:
    told = {"table": "memory", "row": "pending operations", "cells": {"megabytes": 0.125, "node": 1234.4}} | changed
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"benchmarks": [
        {"name": "test_documents_memory", "extra_info": {"documents": [told]}}, {"name": "test_x", "extra_info": {}}]}))
    return path


def test_a_row_that_was_measured_replaces_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, results = tmp_path / "documents.md", tmp_path / "documents.json"
    page.write_text(f"Before.\n\n{generated_part.BEGIN}old\n{generated_part.END}\nAfter.\n")
    monkeypatch.setattr(documents, "PAGE", page)
    monkeypatch.setattr(documents, "RESULTS", results)
    documents.main([str(measured(tmp_path)), "--partial"])
    assert "| pending operations | 0.12 | 1,234 |" in capsys.readouterr().out
    assert not results.exists()
    for node in (99.0, 1234.4):
        documents.main([str(measured(tmp_path, cells={"megabytes": 0.125, "node": node}))])
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "| pending operations | 0.12 | 1,234 |" in text
    assert "old" not in text


@pytest.mark.parametrize("changed", [{"table": "x"}, {"row": "x"}, {"cells": {"megabytes": 1.0}}])
def test_what_no_table_has_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    with pytest.raises(documents.UnknownRowError):
        documents.main([str(measured(tmp_path, **changed)), "--partial"])


def test_every_row_is_published_and_on_the_page() -> None:
    rows = documents.load()
    assert {name: set(found) for name, found in rows.items()} == {
        name: set(table.rows) for name, table in documents.TABLES.items()}
    text = documents.PAGE.read_text(encoding="utf-8")
    assert documents.page(text, rows) == text
