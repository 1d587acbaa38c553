"""A timeline for Perfetto and Chrome's own viewer: the trace event format, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.common.tracing.spans import Span, SpanStage

PROCESS = 1
TRACKS = ("calls of the model", "capture", "wire", "execution")
"""From top to bottom. Events on a track do not overlap; threads that do the same work have separate tracks."""
_TRACK_OF = {SpanStage.CAPTURE: "capture", SpanStage.WIRE: "wire", SpanStage.EXECUTION: "execution"}


def events_of(spans: Iterable[Span], calls: Sequence[Span] = (), phases: Sequence[ExecutionPhase] = ()) -> list[Any]:
    """Convert spans to trace events.

    Args:
        spans: The collected spans.
        calls: Calls of the model, in order.
        phases: The phase of each call, if it is known.
    """
    placed = [("calls of the model", _named(call, index, phases)) for index, call in enumerate(calls)]
    placed += [(_TRACK_OF[span.stage], span) for span in spans]
    placed.sort(key=lambda item: (item[1].begin_ns, -item[1].end_ns))
    if not placed:
        return []
    begin_ns = placed[0][1].begin_ns
    lines: dict[tuple[str, str], int] = {}
    events: list[Any] = []
    for track, span in placed:
        line = lines.setdefault((track, span.thread), len(TRACKS) * len(lines) + TRACKS.index(track) + 1)
        events.append({
            "name": span.name, "cat": track, "ph": "X", "pid": PROCESS, "tid": line,
            "ts": (span.begin_ns - begin_ns) / 1000, "dur": (span.end_ns - span.begin_ns) / 1000,
            "args": dict(span.facts)})
    return [*_names(lines), *events, *_arrows(events)]


def write(path: Path, events: Sequence[Any]) -> None:
    """Write a file that https://ui.perfetto.dev and ``chrome://tracing`` open."""
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}, indent=None), encoding="utf-8")


def _named(call: Span, index: int, phases: Sequence[ExecutionPhase]) -> Span:
    phase = phases[index] if index < len(phases) else ExecutionPhase.UNKNOWN
    name = call.name if phase is ExecutionPhase.UNKNOWN else f"{call.name}: {phase.replace('_', ' ')}"
    return attrs.evolve(call, name=name, facts={**call.facts, "call": index, "phase": str(phase)})


def _names(lines: dict[tuple[str, str], int]) -> list[Any]:
    """Name the tracks, and set their order."""
    named: list[Any] = [{"name": "process_name", "ph": "M", "pid": PROCESS, "tid": 0, "args": {"name": "djinn"}}]
    for (track, thread), line in lines.items():
        named.append({"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": line,
                      "args": {"name": f"{track} ({thread})"}})
        named.append({"name": "thread_sort_index", "ph": "M", "pid": PROCESS, "tid": line,
                      "args": {"sort_index": 100 * TRACKS.index(track) + line}})
    return named


def _arrows(events: Sequence[Any]) -> list[Any]:
    """Connect each batch on the wire to the first of its programs that the executor ran."""
    ran = {(event["args"]["executor"], event["args"]["run"]): event
           for event in events if event["cat"] == "execution" and "run" in event["args"]}
    arrows = []
    for number, source in enumerate(event for event in events if event["cat"] == "wire" and event["args"].get("runs")):
        target = ran.get((source["args"]["executor"], source["args"]["run"]))
        if target is None:
            continue
        common = {"name": "batch", "cat": "batch", "id": number, "pid": PROCESS}
        arrows.append({**common, "ph": "s", "tid": source["tid"], "ts": source["ts"]})
        arrows.append({**common, "ph": "f", "bp": "e", "tid": target["tid"], "ts": target["ts"]})
    return arrows
