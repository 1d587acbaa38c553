"""The timeline file: events that a viewer of traces understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.common.tracing.spans import Span, SpanStage
from djinn_plugins.watch.trace.timeline import events_of, write

SPANS = [
    Span("record", SpanStage.CAPTURE, 1_000, 5_000, "MainThread", {"operations": 3}),
    Span("hand over", SpanStage.WIRE, 5_000, 6_000, "MainThread", {"runs": 2, "run": 7, "executor": "here"}),
    Span("run", SpanStage.EXECUTION, 5_500, 9_500, "executor", {"run": 7, "executor": "here"}),
]
CALLS = [Span("Model", SpanStage.CAPTURE, 1_500, 4_000, "MainThread")]


def test_spans_are_complete_events_in_microseconds_from_the_beginning() -> None:
    events = [event for event in events_of(SPANS, CALLS, (ExecutionPhase.LLM_DECODE,)) if event["ph"] == "X"]
    assert [(event["name"], event["cat"], event["ts"], event["dur"]) for event in events] == [
        ("record", "capture", 0.0, 4.0), ("Model: llm decode", "calls of the model", 0.5, 2.5),
        ("hand over", "wire", 4.0, 1.0), ("run", "execution", 4.5, 4.0)]
    assert len({event["tid"] for event in events}) == 4
    assert events[0]["args"] == {"operations": 3}


def test_every_track_has_a_name_and_a_place() -> None:
    events = events_of(SPANS, CALLS)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    places = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert set(named) == {event["tid"] for event in events if event["ph"] == "X"} == set(places)
    assert [named[line] for line in sorted(places, key=lambda line: places[line])] == [
        "calls of the model (MainThread)", "capture (MainThread)", "wire (MainThread)", "execution (executor)"]


def test_an_arrow_leads_from_the_wire_to_the_execution() -> None:
    arrows = [event for event in events_of(SPANS) if event.get("cat") == "batch"]
    assert [(event["ph"], event["id"], event["ts"]) for event in arrows] == [("s", 0, 4.0), ("f", 0, 4.5)]


@pytest.mark.parametrize("other", [{"run": 8, "executor": "here"}, {"run": 7, "executor": "elsewhere"}, {}])
def test_no_arrow_leads_to_another_run(other: dict[str, Any]) -> None:
    ran = Span("run", SpanStage.EXECUTION, 5_000, 9_000, "executor", other)
    assert {event["ph"] for event in events_of([*SPANS[:2], ran])} == {"M", "X"}


def test_nothing_happened_is_a_timeline_too(tmp_path: Path) -> None:
    write(tmp_path / "empty.json", events_of([]))
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
