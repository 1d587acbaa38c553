"""Spans of a session, and ``djinn trace``, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn

import djinn
from djinn.kinds.backend_wrapper import unwrapped
from djinn_plugins.common.tracing import spans
from djinn_plugins.common.tracing.spans import Span, SpanStage, spans_of

SCRIPT = """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    with torch.no_grad():
        for _ in range(int(sys.argv[1])):
            y = model(torch.ones(4, 8))
    print(sys.argv, __name__, y.device, tuple(y.sum(0).tolist()) != (0, 0))
"""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    djinn.shutdown()


def work() -> None:
    x = torch.randn(64, 64, device="remote_accelerator:0")
    for _ in range(5):
        x = (x @ x).relu()
        djinn.flush()
    x.sum().item()


def by_stage(found: spans.Spans) -> dict[SpanStage, list[Span]]:
    return {stage: [span for span in found if span.stage is stage] for stage in SpanStage}


def test_recording_wire_and_execution_are_told_apart_in_this_process() -> None:
    session = djinn.init(flush_every=None)
    with spans_of(session) as found:
        work()
    told = by_stage(found)
    assert len(told[SpanStage.WIRE]) == len(told[SpanStage.EXECUTION]) == 6
    assert sum(span.facts["operations"] for span in told[SpanStage.CAPTURE]) == 1 + 10 + 2
    assert [span.name for span in told[SpanStage.WIRE]] == ["hand over"] * 5 + ["ask and wait"]
    # Also those that travel as what is not as expected.
    assert [span.facts["runs"] for span in told[SpanStage.WIRE]] == [1] * 6
    assert {span.thread for span in told[SpanStage.EXECUTION]} == {"cpu"}
    assert all(span.begin_ns <= span.end_ns for span in found)
    for handed, executed in zip(told[SpanStage.WIRE], told[SpanStage.EXECUTION], strict=True):
        assert handed.begin_ns <= executed.begin_ns, "what was not handed over is not run"
    assert told[SpanStage.EXECUTION][-1].end_ns <= told[SpanStage.WIRE][-1].end_ns, "who waits waits for the executor"


def test_nothing_is_left_behind_when_nobody_asks_any_more() -> None:
    session = djinn.init(flush_every=None)
    connection = unwrapped(session.backend).connection
    with spans_of(session) as found:
        assert unwrapped(session.backend).connection is not connection
        with pytest.raises(RuntimeError, match="already"), spans_of(session):
            pass
        work()
        count, sent = len(found), djinn.stats()["nodes_executed"]
    assert unwrapped(session.backend).connection is connection
    work()
    assert len(found) == count > 0
    with spans_of(session) as others:
        work()
    runs = [span.facts["run"] for span in others if span.stage is SpanStage.EXECUTION]
    assert runs == list(range(6)), "what ran before is not told of"
    assert djinn.stats()["nodes_executed"] > sent


def test_an_error_ends_its_span_and_reaches_the_user() -> None:
    session = djinn.init(flush_every=None)
    with spans_of(session) as found:
        index = torch.tensor([7]).to("remote_accelerator:0")
        with pytest.raises(IndexError):
            torch.ones(3, device="remote_accelerator:0").index_select(0, index).sum().item()
    assert [span.stage for span in found][-1] in (SpanStage.WIRE, SpanStage.EXECUTION)
    assert djinn.is_initialized()


def test_an_executor_elsewhere_tells_when_it_ran(server: Any) -> None:
    session = djinn.init(server=server.address, flush_every=None)
    with spans_of(session) as found:
        work()
    told = by_stage(found)
    assert [span.facts["run"] for span in told[SpanStage.EXECUTION]] == list(range(6))
    assert {span.facts["executor"] for span in told[SpanStage.EXECUTION]} == {server.address}
    for handed, executed in zip(told[SpanStage.WIRE], told[SpanStage.EXECUTION], strict=True):
        assert (handed.facts["runs"], handed.facts["run"]) == (1, executed.facts["run"])
        assert handed.begin_ns <= executed.begin_ns <= executed.end_ns <= told[SpanStage.WIRE][-1].end_ns
    assert sum(span.facts["bytes_sent"] for span in told[SpanStage.WIRE]) > 0
    assert told[SpanStage.WIRE][-1].facts["bytes_received"] > 0


def trace(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "work.py").write_text(textwrap.dedent(script))
    return run_djinn("trace", "work.py", *arguments, folder=folder)


def graph_in(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    _, _, rest = text.partition('<script type="application/json" id="graph">')
    graph: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return graph


def test_a_traced_script_runs_as_usual_and_leaves_two_files(tmp_path: Path) -> None:
    done = trace(tmp_path, SCRIPT, "3", "--flag")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['work.py', '3', '--flag'] __main__ remote_accelerator:0 True\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work.html", "work.py", "work.trace.json"]
    graph = graph_in(tmp_path / "work.html")
    modules = {(node.get("module"), node.get("call")) for node in graph["nodes"]}
    assert {(f"{block}.{name}", call) for block in (0, 1) for name in ("norm", "up", "down")
            for call in range(3)} | {("2", call) for call in range(3)} <= modules
    assert {"0.up.weight", "2.bias"} <= {value.get("name") for value in graph["values"]}
    events = json.loads((tmp_path / "work.trace.json").read_text())["traceEvents"]
    kinds = [event["cat"] for event in events if event["ph"] == "X"]
    assert kinds.count("calls of the model") == 3
    assert {"capture", "wire", "execution"} <= set(kinds)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_script_that_fails_is_told_as_python_tells_it_and_still_drawn(tmp_path: Path) -> None:
    done = trace(tmp_path, f"{SCRIPT}\n    raise ValueError('it broke')\n", "1")
    assert done.returncode == 1
    assert "ValueError: it broke" in done.stderr
    assert len(graph_in(tmp_path / "work.html")["nodes"]) > 10
    assert (tmp_path / "work.trace.json").exists()


def test_the_exit_status_is_the_scripts(tmp_path: Path) -> None:
    assert trace(tmp_path, "import sys; sys.exit(7)").returncode == 7
    assert graph_in(tmp_path / "work.html")["nodes"] == []


def test_what_no_model_does_is_drawn_too(tmp_path: Path) -> None:
    done = trace(tmp_path, "import torch; print((torch.ones(3) + 1).sum().item())")
    assert (done.returncode, done.stdout) == (0, "6.0\n")
    assert [node["operation"].partition(".")[0] for node in graph_in(tmp_path / "work.html")["nodes"]] == [
        "aten::ones", "aten::add", "aten::sum", "aten::_local_scalar_dense"]


def test_a_script_that_does_not_exist_is_a_plain_message(tmp_path: Path) -> None:
    done = run_djinn("trace", "absent.py", folder=tmp_path)
    assert done.returncode == 1
    assert "There is no file absent.py." in done.stderr
    assert list(tmp_path.iterdir()) == []
