"""Presents schedules: as tables and bars in a terminal, in a notebook, and as a page with a timeline."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs
import torch

from djinn_plugins.graph.capture import explain_tensor
from djinn_plugins.graph.display import amount
from djinn_plugins.graph.graph import GraphNode
from djinn_plugins.graph.html_page import page
from djinn_plugins.schedule.profiling import MeasuredPiece, MeasuredTransfer, Measurement
from djinn_plugins.schedule.schedule import ExecutionSchedule, StepSpan
from djinn_plugins.schedule.semantics import meaning_of

if TYPE_CHECKING:
    from rich.table import Table

TEXT_WIDTH = 110
"""Columns of the text."""
_SHADES = " ░▒▓█"
_BAR_WIDTH = 64


@attrs.frozen
class DeviceRow:
    """The work that a schedule assigns to one device."""

    device: str
    nodes: int
    """Nodes that run there, including replicas."""
    programs: int
    """Contiguous pieces in the order of all nodes; each is submitted as one program."""
    compute_s: float
    """Expected work of the nodes that have a span."""
    received: tuple[int, int]
    """Transfers to it, and their bytes."""
    sent: tuple[int, int]
    """Transfers from it, and their bytes."""
    peak_bytes: int | None
    """Most bytes held at once, including those held before; ``None`` if not estimated."""
    memory_bytes: int | None
    """The device's memory; ``None`` if unknown."""
    measured_s: float | None
    """Measured work, if it was measured."""

    @property
    def fits(self) -> bool:
        """Whether its memory is sufficient, as far as known."""
        return self.peak_bytes is None or self.memory_bytes is None or self.peak_bytes <= self.memory_bytes


@attrs.frozen
class Bar:
    """An item on a lane of the timeline."""

    span: StepSpan
    name: str
    """Name of the operation or value."""
    detail: str = ""
    """Where it belongs, or its size."""
    phase: str = "unknown"
    node: str = ""
    """Identifier of the node, if the item is a node."""


@attrs.frozen
class TimelineLane:
    """The activity of one device or link, in order of time."""

    name: str
    kind: str
    """``planned``, ``measured`` or ``link``."""
    bars: tuple[Bar, ...]


@attrs.frozen(eq=False, slots=False)
class Explanation:
    """An explanation of a schedule: `str` for terminals, a table in notebooks, `to_html` for a page."""

    schedule: ExecutionSchedule
    measured: tuple[MeasuredPiece, ...] = ()
    transfers: tuple[MeasuredTransfer, ...] = ()
    """Measured transfers."""

    @cached_property
    def devices(self) -> tuple[DeviceRow, ...]:
        """The work of each device, including idle devices if they are known."""
        schedule = self.schedule
        infos = {info.id: info for info in schedule.device_infos}
        names = dict.fromkeys([*infos, *schedule.devices.values()])
        placed = [(device, node) for node in schedule.order
                  for device in (schedule.devices[node], *schedule.replicas.get(node, ()))]
        runs = [device for device, _ in groupby(schedule.devices[node] for node in schedule.order)]
        rows = []
        for name in names:
            there = [node for device, node in placed if device == name]
            pieces = [piece for piece in self.measured if piece.device == name]
            rows.append(DeviceRow(
                device=name, nodes=len(there), programs=runs.count(name),
                compute_s=sum(_length_s(schedule.spans[node]) for node in there if node in schedule.spans),
                received=_moved(move.size_bytes for move in schedule.transfers if move.target == name),
                sent=_moved(move.size_bytes for move in schedule.transfers if move.source == name),
                peak_bytes=schedule.budgets.get(name),
                memory_bytes=infos[name].memory_bytes if name in infos else None,
                measured_s=sum(_length_s(piece.span) for piece in pieces) if self.measured else None))
        return tuple(rows)

    @cached_property
    def lanes(self) -> tuple[TimelineLane, ...]:
        """Devices with planned and measured work, then links."""
        schedule = self.schedule
        nodes = {node.id: node for node in schedule.graph.nodes()} if schedule.graph else {}
        lanes = []
        for row in self.devices:
            planned = [_node_bar(nodes.get(node), node, schedule.spans[node]) for node in schedule.order
                       if schedule.devices[node] == row.device and node in schedule.spans]
            measured = [_piece_bar(piece, nodes) for piece in self.measured if piece.device == row.device]
            lanes += [TimelineLane(row.device, kind, _by_time(bars))
                      for kind, bars in (("planned", planned), ("measured", measured)) if bars]
        links: dict[tuple[str, str], list[Bar]] = {}
        for move, span in schedule.transfer_spans.items():
            links.setdefault((move.source, move.target), []).append(
                Bar(span, move.value, amount(move.size_bytes, "B"), "transfer"))
        moved: dict[tuple[str, str], list[Bar]] = {}
        for measured_move in self.transfers:
            moved.setdefault((measured_move.source, measured_move.target), []).append(
                Bar(measured_move.span, measured_move.value, "", "transfer"))
        for source, target in sorted({*links, *moved}):
            lanes += [TimelineLane(f"{source} → {target}", kind, _by_time(found[source, target]))
                      for kind, found in (("link", links), ("measured", moved)) if (source, target) in found]
        return tuple(lanes)

    @property
    def headline(self) -> str:
        """A one-line summary."""
        schedule, estimate = self.schedule, self.schedule.estimate
        used = sum(row.nodes > 0 for row in self.devices)
        parts = [f"{_counted(len(schedule.order), 'node')} on {used} of {_counted(len(self.devices), 'device')}"]
        if schedule.transfers:
            count, size = _moved(move.size_bytes for move in schedule.transfers)
            parts.append(f"{_counted(count, 'transfer')} of {amount(size, 'B')}")
        parts.append(f"{seconds(estimate.latency_s)} expected")
        if self.measured:
            parts.append(f"{seconds(max(piece.span.end_s for piece in self.measured))} measured")
        return f"{schedule.scheduler or 'schedule'}: {', '.join(parts)}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Further facts about the schedule."""
        schedule, estimate = self.schedule, self.schedule.estimate
        replicas = sum(map(len, schedule.replicas.values()))
        told = [
            ("profiles", "measured" if estimate.is_measured else "defaults, not measured; see djinn.calibrate()"),
            ("compute", seconds(estimate.compute_s)),
            ("transfers", seconds(estimate.transfer_s) if schedule.transfers else ""),
            ("waiting for others", seconds(estimate.queueing_s) if estimate.queueing_s else ""),
            ("score", f"{estimate.score:.3g}" if estimate.score else ""),
            ("run again elsewhere", f"{_counted(replicas, 'node')}, whose results need not move" if replicas else ""),
            ("flags", ", ".join(sorted(schedule.flags))),
            ("too little memory", ", ".join(row.device for row in self.devices if not row.fits)),
        ]
        return [(name, text) for name, text in told if text]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.text import Text

        console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, legacy_windows=False)
        console.print(Text(self.headline))
        console.print(_table(self))
        for name, text in self.facts:
            console.print(Text(f"{name}: {text}"))
        for line in self._bars():
            console.print(Text(line), no_wrap=True, crop=True)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Explanation({self.headline})"

    def _bars(self) -> Iterator[str]:
        """Draw the lanes with characters; darker ones mean a busier part of the time."""
        if not self.lanes:
            return
        end_s = _end_s(self.lanes)
        names = [f"{lane.name} {'measured' if lane.kind == 'measured' else ''}".strip() for lane in self.lanes]
        width = min(max(map(len, names)), TEXT_WIDTH - _BAR_WIDTH - 4)
        yield ""
        for name, lane in zip(names, self.lanes, strict=True):
            cut = name if len(name) <= width else f"{name[: width - 1]}…"
            cells = _busy(lane.bars, end_s, _BAR_WIDTH)
            yield f"{cut:<{width}} │{''.join(_SHADES[_shade(part)] for part in cells)}│"
        last = seconds(end_s)
        yield f"{'':<{width}}  0{last:>{_BAR_WIDTH - 1}}"

    def _repr_html_(self) -> str:
        return f"<div><b>{escape(self.headline)}</b></div>{_html_table(self)}{_html_facts(self)}"

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a single page to view in a browser; it needs no network.

        Returns:
            The path.
        """
        target = Path(path)
        script = "\n".join(["(() => {", "'use strict';", _asset("plan.js"), "})();"])
        target.write_text(page(_asset("plan.html"), title=self.headline, style=_asset("plan.css"), script=script,
                               data=self._data(), table=_html_table(self, plain=True),
                               facts=_html_facts(self, plain=True)), encoding="utf-8")
        return target

    def _data(self) -> dict[str, Any]:
        """Build the data that the page's script draws: each text once, and bars as numbers, in nanoseconds."""
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        lanes = [{"name": lane.name, "kind": lane.kind, "bars": [
            [round(bar.span.begin_s * 1e9), round(bar.span.end_s * 1e9), number(bar.name), number(bar.detail),
             number(bar.phase), number(bar.node)] for bar in lane.bars]} for lane in self.lanes]
        return {"end": round(_end_s(self.lanes) * 1e9), "lanes": lanes, "texts": list(texts)}


@overload
def explain(subject: torch.Tensor) -> str: ...
@overload
def explain(
    subject: ExecutionSchedule, measured: Measurement | Sequence[MeasuredPiece] | None = None
) -> Explanation: ...
def explain(subject: torch.Tensor | ExecutionSchedule, measured: Any = None) -> str | Explanation:
    """Explain which operations are pending behind a lazy tensor and why, or what a schedule does. Executes nothing.

    Args:
        subject: A tensor, or the result of `djinn.schedule`.
        measured: For a schedule: the result of `djinn_plugins.schedule.profiling.measure`.

    Returns:
        Text for a tensor. For a schedule, an object that prints as tables and bars, is displayed by notebooks, and
        writes a page with ``to_html(path)``.
    """
    return explain_tensor(subject) if isinstance(subject, torch.Tensor) else explain_schedule(subject, measured)


def explain_schedule(
    schedule: ExecutionSchedule, measured: Measurement | Sequence[MeasuredPiece] | None = None
) -> Explanation:
    """Explain a schedule.

    Args:
        schedule: Which.
        measured: The result of `djinn_plugins.schedule.profiling.measure`, or any pieces with the times when they ran.
    """
    if isinstance(measured, Measurement):
        return Explanation(schedule, measured.pieces, measured.transfers)
    return Explanation(schedule, tuple(measured or ()))


def seconds(time_s: float) -> str:
    """Format a time with three digits."""
    for unit, size_s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time_s >= size_s:
            return f"{time_s / size_s:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"


def _length_s(span: StepSpan) -> float:
    return span.end_s - span.begin_s


def _moved(sizes: Iterable[int]) -> tuple[int, int]:
    listed = list(sizes)
    return len(listed), sum(listed)


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _node_bar(node: GraphNode | None, identifier: str, span: StepSpan) -> Bar:
    if node is None:
        return Bar(span, identifier, node=identifier)
    meaning = meaning_of(node)
    module = node.origin.module_path or (meaning.module_path if meaning else None) or ""
    phase = str(meaning.execution_phase) if meaning else "unknown"
    return Bar(span, node.operation.partition("::")[2] or node.operation, module, phase, identifier)


def _piece_bar(piece: MeasuredPiece, nodes: dict[str, GraphNode]) -> Bar:
    first, last = piece.nodes[0], piece.nodes[-1]
    name = f"{len(piece.nodes)} nodes" if len(piece.nodes) > 1 else _node_bar(nodes.get(first), first, piece.span).name
    detail = f"{first} to {last}"
    phases = {_node_bar(nodes.get(node), node, piece.span).phase for node in piece.nodes}
    return Bar(piece.span, name, detail, phases.pop() if len(phases) == 1 else "unknown", first)


def _by_time(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    return tuple(sorted(bars, key=lambda bar: (bar.span.begin_s, bar.span.end_s)))


def _end_s(lanes: Sequence[TimelineLane]) -> float:
    return max((bar.span.end_s for lane in lanes for bar in lane.bars), default=0.0)


def _busy(bars: Sequence[Bar], end_s: float, cells: int) -> list[float]:
    """Return the busy fraction of each of ``cells`` equal parts of the time."""
    parts = [0.0] * cells
    if end_s <= 0:
        return parts
    step_s = end_s / cells
    for bar in bars:
        first = min(cells - 1, int(bar.span.begin_s / step_s))
        last = min(cells - 1, int(bar.span.end_s / step_s))
        for cell in range(first, last + 1):
            overlap_s = min(bar.span.end_s, (cell + 1) * step_s) - max(bar.span.begin_s, cell * step_s)
            parts[cell] += max(0.0, overlap_s) / step_s
    return parts


def _shade(part: float) -> int:
    """Return the shade of a cell; any activity at all is visible."""
    return 0 if part <= 0 else max(1, min(4, round(part * 4)))


_COLUMNS = ("device", "nodes", "programs", "compute", "measured", "in", "out", "peak", "memory")


def _cells(row: DeviceRow) -> tuple[str, ...]:
    def moved(count: int, size: int) -> str:
        return f"{count:,} · {amount(size, 'B')}" if count else ""

    return (row.device, f"{row.nodes:,}", f"{row.programs:,}", seconds(row.compute_s) if row.compute_s else "",
            "" if row.measured_s is None else seconds(row.measured_s), moved(*row.received), moved(*row.sent),
            "" if row.peak_bytes is None else amount(row.peak_bytes, "B"),
            "" if row.memory_bytes is None else amount(row.memory_bytes, "B") + ("" if row.fits else " !"))


def _filled_columns(explanation: Explanation) -> tuple[list[str], list[list[str]]]:
    """Return the table without empty columns."""
    rows = [_cells(row) for row in explanation.devices]
    shown = [place for place, _ in enumerate(_COLUMNS) if any(row[place] for row in rows)]
    return [_COLUMNS[place] for place in shown], [[row[place] for place in shown] for row in rows]


def _table(explanation: Explanation) -> Table:
    from rich import box
    from rich.table import Table

    heads, rows = _filled_columns(explanation)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "device" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _html_table(explanation: Explanation, *, plain: bool = False) -> str:
    """Render the table; with inline styles where there is no style sheet, as in a notebook."""
    heads, rows = _filled_columns(explanation)

    def cells(tag: str, texts: Sequence[str]) -> str:
        written = []
        for place, text in enumerate(texts):
            style = "" if plain else f' style="text-align:{"right" if place else "left"};padding:1px 10px"'
            written.append(f"<{tag}{style}>{escape(text)}</{tag}>")
        return f"<tr>{''.join(written)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', heads)}</thead><tbody>{body}</tbody></table>"


def _html_facts(explanation: Explanation, *, plain: bool = False) -> str:
    separator = "" if plain else " · "
    return "<p>" + separator.join(f"<span>{escape(name)} <b>{escape(text)}</b></span>"
                                  for name, text in explanation.facts) + "</p>"


@cache
def _asset(name: str) -> str:
    return (resources.files("djinn_plugins.schedule") / "assets" / name).read_text(encoding="utf-8")
