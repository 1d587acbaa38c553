"""Schedules for people: numbers that are those of the schedule, text, notebooks, and the page in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.pages.chromium import Page, browser
from torch import nn

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.graph import GraphNode, Origin, RecordedGraph
from djinn_plugins.graph.metadata import SemanticMetadata
from djinn_plugins.schedule.profiling import MeasuredPiece, measure
from djinn_plugins.schedule.report import TEXT_WIDTH, Explanation, explain_schedule, seconds
from djinn_plugins.schedule.schedule import CostEstimate, DeviceInfo, ExecutionSchedule, StepSpan, Transfer

DEVICE = "remote_accelerator:0"
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> $title ${data}"
DRAW_S = 5.0


def node(number: int, phase: ExecutionPhase = ExecutionPhase.FORWARD, module: str = "") -> GraphNode:
    return GraphNode(f"n{number}", "made::up", (f"v{number}",) if number else (), (f"v{number + 1}",), (None,),
                     origin=Origin(module_path=module),
                     metadata={"meaning": SemanticMetadata("made::up", execution_phase=phase)})


def two_devices(**more: Any) -> ExecutionSchedule:
    """Three nodes: two on one device, then one on another, with all that a schedule can say."""
    moved = Transfer("v2", "left", "right", "n1", 2_000_000)
    nodes = (node(0, module="encoder.0"), node(1), node(2, ExecutionPhase.LLM_DECODE))
    return attrs.evolve(ExecutionSchedule(
        ("n0", "n1", "n2"), {"n0": "left", "n1": "left", "n2": "right"}, (moved,), scheduler="made up",
        replicas={"n0": ("right",)}, budgets={"left": 5_000_000, "right": 9_000_000},
        spans={"n0": StepSpan(0, 1e-3), "n1": StepSpan(1e-3, 3e-3), "n2": StepSpan(5e-3, 6e-3)},
        transfer_spans={moved: StepSpan(3e-3, 5e-3)},
        estimate=CostEstimate(6e-3, 4e-3, 2e-3, 0.5e-3, 2_000_000, 6.5e-3), flags=frozenset({"split", "defaults"}),
        graph=RecordedGraph(nodes),
        device_infos=(DeviceInfo("left", memory_bytes=8_000_000), DeviceInfo("right", memory_bytes=8_000_000),
                      DeviceInfo("idle"))), **more)


def test_each_device_is_told_with_what_it_has_to_do() -> None:
    left, right, idle = djinn.explain(two_devices()).devices
    assert (left.device, left.nodes, left.programs) == ("left", 2, 1)
    assert left.compute_s == pytest.approx(3e-3)
    assert (left.sent, left.received) == ((1, 2_000_000), (0, 0))
    assert (left.peak_bytes, left.memory_bytes, left.fits) == (5_000_000, 8_000_000, True)
    assert (right.nodes, right.programs, right.received, right.fits) == (2, 1, (1, 2_000_000), False)
    assert right.compute_s == pytest.approx(2e-3), "what runs there too counts there too"
    assert (idle.nodes, idle.peak_bytes, idle.memory_bytes, idle.fits) == (0, None, None, True)


def test_programs_are_counted_where_the_device_changes() -> None:
    schedule = two_devices(devices={"n0": "left", "n1": "right", "n2": "left"})
    assert [row.programs for row in djinn.explain(schedule).devices] == [2, 1, 0]


def test_the_text_says_all_of_it_and_fits() -> None:
    text = str(djinn.explain(two_devices()))
    lines = text.splitlines()
    assert max(map(len, lines)) <= TEXT_WIDTH
    assert lines[0] == "made up: 3 nodes on 2 of 3 devices, 1 transfer of 2 MB, 6 ms expected"
    (row,) = (line for line in lines if line.startswith(" right "))
    assert row.split("  ")[-1].strip() == "8 MB !", "too little memory is marked"
    for line in ("compute: 4 ms", "transfers: 2 ms", "waiting for others: 500 µs", "too little memory: right",
                 "flags: defaults, split", "run again elsewhere: 1 node, whose results need not move",
                 "profiles: defaults, not measured; see djinn.calibrate()"):
        assert line in lines
    assert "measured  " not in text, "no column without anything in it"


def test_bars_of_letters_are_dark_where_a_device_is_busy() -> None:
    lines = str(djinn.explain(two_devices())).splitlines()
    bars = {line.split("│")[0].strip(): line.split("│")[1] for line in lines if line.count("│") == 2}
    assert list(bars) == ["left", "right", "left → right"]
    half = len(bars["left"]) // 2
    assert set(bars["left"][:half]) == {"█"}
    assert set(bars["left"][half:]) == {" "}
    assert bars["right"].strip() == bars["right"][-len(bars["right"].strip()):], "at the end"
    assert len(bars["right"].strip()) == pytest.approx(half / 3, abs=1)
    assert lines[-1].endswith("6 ms")


def test_a_bar_that_is_very_short_is_still_to_be_seen() -> None:
    schedule = two_devices(spans={"n0": StepSpan(0, 1e-9), "n1": StepSpan(1, 2)}, transfer_spans={})
    bar = next(line for line in str(djinn.explain(schedule)).splitlines() if line.startswith("left"))
    assert bar.split("│")[1][0] == "░"


def test_what_was_measured_stands_beside_what_was_planned() -> None:
    pieces = [MeasuredPiece("left", ("n0", "n1"), StepSpan(0, 4e-3)),
              MeasuredPiece("right", ("n2",), StepSpan(4e-3, 9e-3))]
    found = djinn.explain(two_devices(), pieces)
    assert [row.measured_s for row in found.devices] == pytest.approx([4e-3, 5e-3, 0])
    assert [(lane.name, lane.kind) for lane in found.lanes] == [
        ("left", "planned"), ("left", "measured"), ("right", "planned"), ("right", "measured"),
        ("left → right", "link")]
    assert [bar.name for lane in found.lanes if lane.kind == "measured" for bar in lane.bars] == ["2 nodes", "up"]
    assert "9 ms measured" in str(found)
    assert "measured" in str(found).splitlines()[2]


def test_a_schedule_of_a_real_run_is_explained_with_its_measurement() -> None:
    djinn.init()
    try:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(DEVICE)
        x = torch.ones(4, 32).to(DEVICE)
        with djinn.capture(model) as captured, torch.inference_mode():
            model(x)
        schedule = djinn.schedule(captured, "latency")
        found = djinn.explain(schedule, measure(schedule, pieces=2))
    finally:
        djinn.shutdown()
    (row,) = found.devices
    assert (row.device, row.nodes, row.programs) == (DEVICE, 3, 1)
    assert row.compute_s > 0
    assert row.measured_s is not None
    assert row.measured_s > 0
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert row.peak_bytes is not None
    assert row.peak_bytes >= weights, "weights that the device holds already are counted"
    planned, measured = found.lanes
    assert [bar.name for bar in planned.bars] == ["linear", "gelu", "linear"]
    assert [bar.detail for bar in planned.bars] == ["0", "1", "2"]
    assert {bar.phase for bar in planned.bars} == {"forward"}
    assert len(measured.bars) == 2


def test_a_tensor_is_explained_as_ever() -> None:
    djinn.init()
    try:
        assert isinstance(djinn.explain(torch.ones(2, device=DEVICE) + 1), str)
    finally:
        djinn.shutdown()


def test_times_are_written_with_three_digits() -> None:
    assert [seconds(time_s) for time_s in (0, 2e-9, 1.5e-6, 0.01234, 1, 75)] == [
        "0 s", "2 ns", "1.5 µs", "12.3 ms", "1 s", "75 s"]


class Words(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_a_notebook_shows_the_table() -> None:
    words = Words(djinn.explain(two_devices(scheduler=HOSTILE))._repr_html_())
    assert not words.open, "every element is closed"
    assert not words.seen & {"script", "img", "link"}
    assert words.cells[0] == "left"
    assert "8 MB !" in words.cells


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest) -> None:
    if "page" in request.fixturenames:
        request.getfixturevalue("page").resize(1200, 800)


def show(page: Page, explanation: Explanation, path: Path) -> None:
    page.open(explanation.to_html(path))
    assert page.requests == [path.as_uri()], "the page asks for nothing else"
    assert page.problems == []


def bars(page: Page) -> list[list[float]]:
    found: list[list[float]] = page.value(
        "[...document.querySelectorAll('.bar')].map((bar) => { const r = bar.getBoundingClientRect();"
        "return [r.x, r.right, r.y, r.bottom]; })")
    return found


def test_the_page_draws_lanes_to_scale(page: Page, tmp_path: Path) -> None:
    pieces = [MeasuredPiece("left", ("n0", "n1"), StepSpan(0, 4e-3)),
              MeasuredPiece("right", ("n2",), StepSpan(4e-3, 6e-3))]
    show(page, djinn.explain(two_devices(), pieces), tmp_path / "plan.html")
    assert page.texts(".name") == ["left", "right", "left → right"]
    assert page.texts(".kind") == ["planned", "measured", "planned", "measured", "transfers"]
    n0, n1, measured, n2, _, moved = bars(page)
    scale = (n1[1] - n0[0]) / 3
    assert n0[1] - n0[0] == pytest.approx(scale, abs=2)
    assert n1[1] - n1[0] == pytest.approx(2 * scale, abs=2)
    assert moved[0] == pytest.approx(n1[1], abs=2)
    assert moved[1] == pytest.approx(n2[0], abs=2)
    assert measured[1] - measured[0] == pytest.approx(4 * scale, abs=2)
    assert measured[2] >= n0[3], "lanes lie below each other"
    assert "6 ms" in page.texts("#window")[0]
    assert page.texts("#devices td")[0] == "left"
    assert page.texts("#legend span") == ["forward", "llm decode", "transfer"]


def test_the_pointer_learns_what_a_bar_is(page: Page, tmp_path: Path) -> None:
    show(page, djinn.explain(two_devices()), tmp_path / "plan.html")
    page.point_at(".bar")
    told = page.texts("#hover")[0]
    for words in ("up", "n0 · encoder.0", "forward", "1 ms", "planned, 0 to 1 ms"):
        assert words in told
    page.point_at("h1")
    assert page.value("document.getElementById('hover').hidden")


def test_keys_and_buttons_move_and_zoom(page: Page, tmp_path: Path) -> None:
    show(page, djinn.explain(two_devices()), tmp_path / "plan.html")
    assert page.texts("#window") == ["6 ms"]
    page.value("document.getElementById('in').click()")
    assert page.texts("#window") == ["1.5 ms to 4.5 ms"]
    page.value("document.getElementById('stage').focus()")
    page.press("ArrowRight")
    assert page.texts("#window") == ["1.875 ms to 4.875 ms"]
    page.press("ArrowLeft")
    page.press("-")
    assert page.texts("#window") == ["6 ms"]
    for _ in range(8):
        page.press("+")
    page.press("0")
    assert page.texts("#window") == ["6 ms"]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_can_both_be_read(page: Page, tmp_path: Path, dark: bool) -> None:
    page.resize(1200, 800, dark=dark)
    show(page, djinn.explain(two_devices()), tmp_path / "plan.html")

    def brightness(selector: str, colour: str) -> float:
        red, green, blue = page.value(
            f"getComputedStyle(document.querySelector('{selector}')).{colour}"
            ".match(/[\\d.]+/g).slice(0, 3).map(Number)")
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert (brightness("body", "backgroundColor") < 90) is dark
    assert abs(brightness("h1", "color") - brightness("header", "backgroundColor")) > 120
    assert abs(brightness(".inside", "fill") - brightness(".bar", "fill")) > 80
    page.value("document.getElementById('theme').click()")
    assert (brightness("body", "backgroundColor") < 90) is not dark


def test_names_of_a_graph_become_no_part_of_the_page(page: Page, tmp_path: Path) -> None:
    schedule = two_devices(scheduler=HOSTILE, flags=frozenset({HOSTILE}),
                           devices={"n0": HOSTILE, "n1": HOSTILE, "n2": HOSTILE},
                           graph=RecordedGraph((node(0, module=HOSTILE), node(1), node(2))))
    show(page, djinn.explain(schedule), tmp_path / "plan.html")
    assert page.value("document.title").startswith("</script>")
    assert page.value("document.images.length") == 0
    page.point_at(".bar")
    assert HOSTILE in page.texts("#hover")[0]


def test_what_says_nothing_of_time_has_a_page_too(page: Page, tmp_path: Path) -> None:
    schedule = two_devices(spans={}, transfer_spans={})
    assert "│" not in str(djinn.explain(schedule))
    show(page, djinn.explain(schedule), tmp_path / "plan.html")
    assert page.texts("#stage") == ["The scheduler says nothing of when."]
    show(page, explain_schedule(ExecutionSchedule((), {})), tmp_path / "plan.html")


def long(count: int, names: Sequence[str]) -> ExecutionSchedule:
    nodes = tuple(node(number) for number in range(count))
    places = {each.id: names[number % len(names)] for number, each in enumerate(nodes)}
    spans = {each.id: StepSpan(number * 1e-6, (number + len(names)) * 1e-6) for number, each in enumerate(nodes)}
    return ExecutionSchedule(tuple(places), places, spans=spans, graph=RecordedGraph(nodes))


def test_a_hundred_thousand_nodes_are_drawn_at_once_and_found_by_zooming(page: Page, tmp_path: Path) -> None:
    show(page, djinn.explain(long(100_000, ["a", "b", "c", "d"])), tmp_path / "long.html")
    began = time.monotonic()
    drawn = len(bars(page))
    assert 4 <= drawn < 5_000, "what is too slim is drawn together"
    page.point_at(".bar.many")
    assert "bars close together" in page.texts("#hover")[0]
    page.value("document.getElementById('stage').focus()")
    for _ in range(13):
        page.press("+")
    assert page.texts(".inside").count("up") >= 4
    assert time.monotonic() - began < DRAW_S
