"""The page of many clients and many servers: its pictures, and what counts as a fault of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.reports import generated_part, scale
from support.reports.line_chart import Axis, lines

CLIENTS = {
    "date": "2026-01-01", "machine": "2 cores", "clients": 3, "models": 2, "minutes": 1.0, "models_mib": 5.0,
    "sessions": 4, "answers": 1234, "wrong": 0, "lost": 0, "crashed": 1, "restarted": 1, "device_use": 0.5,
    "shares": {"a": 0.4, "b": 0.6}, "weights": {"a": 0.4, "b": 0.6}, "answer_s": [0.1, 0.2, 0.3],
    "session_s": [1.0, 2.0, 3.0], "recovered_s": [5, 1.0, 2.0], "goodput": [[0, 1.0], [1, 2.0]],
    "memory": [[0, 500.0], [2, 510.0]],
    "sessions_open": [[0, 1], [2, 3]], "admission_ms": {"admitted": 0.5}, "gateway_share": 0.05}


def test_lines_stay_within_the_picture() -> None:
    drawn = ET.fromstring(lines("a < b", Axis("x", is_log=True), Axis("y"), {"one": [(10, 0.5), (1000, 3.0)],
                                                                           "two": [(100, 1.0)]}))
    found = [element.attrib["points"] for element in drawn.iter() if element.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for line in found for point in line.split()]
    assert len(points) == 3
    assert all(70 <= x <= 570 and 30 <= y <= 255 for x, y in points)
    assert points[0][1] > points[2][1] > points[1][1], "larger values are higher"


def test_a_run_replaces_its_part_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, found = tmp_path / "scale.md", tmp_path / "found.jsonl"
    page.write_text(f"before\n{generated_part.BEGIN}old\n{generated_part.END}after\n")
    monkeypatch.setattr(scale, "DOCS", tmp_path)
    monkeypatch.setattr(scale, "RESULTS", tmp_path / "results" / "scale.json")
    (tmp_path / "results").mkdir()
    for answers in (1234, 5678):
        found.write_text(json.dumps({"clients": {**CLIENTS, "answers": answers}}))
        monkeypatch.setattr(sys, "argv", ["scale", str(found)])
        scale.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "5,678" in text
    assert "old" not in text
    assert "1,234" not in text
    assert all((tmp_path / "results" / f"scale-{name}.svg").exists() for name in ("goodput", "memory", "sessions"))
