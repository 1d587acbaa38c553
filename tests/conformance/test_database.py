"""The suite of PyTorch's operator database: it notices what it should, and survives what it must."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch

import djinn
from djinn_conformance import database, report, workers
from djinn_conformance.database import Difference, Direction, Unit, judge, units
from djinn_conformance.expectations import Expectation, expectations, expected, parse_expectations
from djinn_conformance.report import Count, RunCounts
from djinn_conformance.specs import SpecError

_ADD = Unit("add", "float32", Direction.FORWARD)
_EXPECTED = """
[[expected]]
operator = "add"
direction = "forward"
status = "rounding"
reason = "Because of something that is PyTorch's."
link = "aten/src/ATen/native/BinaryOps.cpp, add"
dtypes = ["float32"]
torch = ">=2.13"
"""


@pytest.fixture
def remote() -> Iterator[torch.device]:
    djinn.init(device="cpu")
    yield torch.device("remote_accelerator:0")
    djinn.shutdown()


def _statuses(unit: Unit, device: torch.device) -> set[str]:
    return {difference.status for difference in judge(unit, device).differences}


def test_every_sample_of_a_healthy_operator_is_equal(remote: torch.device) -> None:
    verdict = judge(_ADD, remote)
    assert verdict.total > 10
    assert not verdict.differences


def test_no_sample_costs_a_search_of_the_whole_stack(remote: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks for its running test there. That took an eighth of the processor time of all tests."""
    searches: list[object] = []
    monkeypatch.setattr("inspect.stack", lambda *arguments: searches.append(arguments) or [])
    judged = [unit for unit in units("gather") if judge(unit, remote).total]
    assert {unit.direction for unit in judged} == set(Direction)
    assert not searches


_FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "another value": (lambda made: made + 1, "values"),
    "another rounding": (lambda made: made * (1 + 2e-7), "rounding"),
    "another size": (lambda made: made.unsqueeze(0), "metadata"),
    "another dtype": (lambda made: made.double(), "metadata"),
    "an exception": (lambda made: torch.linalg.cholesky(-torch.eye(2, device=made.device)), "refused"),
}


@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_is_told_by_its_kind(remote: torch.device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, status = _FAULTS[name]
    honest: Callable[..., database._Outcome] = database._run

    def faulty(*arguments: object) -> object:
        outcome = honest(*arguments)
        if arguments[-1] != remote:
            return outcome
        try:
            changed = fault(outcome.result)
            changed.cpu()
        except Exception as error:
            return database._Outcome(raised=error)
        return database._Outcome(changed, outcome.arguments)

    monkeypatch.setattr(database, "_run", faulty)
    assert status in _statuses(_ADD, remote)


def test_eager_that_disagrees_with_itself_is_called_unstable(
    remote: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest: Callable[..., database._Outcome] = database._run
    calls = itertools.count()

    def restless(*arguments: object) -> object:
        outcome = honest(*arguments)
        return database._Outcome(outcome.result + next(calls), outcome.arguments)

    monkeypatch.setattr(database, "_run", restless)
    assert _statuses(_ADD, remote) == {"unstable"}


def test_wrong_calls_are_judged_by_their_exception(remote: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("gather", "float32", Direction.ERRORS)
    assert not judge(unit, remote).differences
    honest: Callable[..., database._Outcome] = database._run

    def lenient(*arguments: object) -> object:
        return database._Outcome() if arguments[-1] == remote else honest(*arguments)

    monkeypatch.setattr(database, "_run", lenient)
    assert _statuses(unit, remote) == {"accepted"}


def test_the_database_is_all_there() -> None:
    names = list(database.operators())
    assert len(names) >= 700
    assert len({unit.operator for name in names for unit in units(name)}) >= 690


@pytest.fixture
def pool() -> Iterator[workers.Pool]:
    made = workers.Pool({"server": "", "device": "cpu"}, 1)
    yield made
    made.close()


def test_a_process_that_ends_is_a_verdict_and_the_next_unit_has_a_new_one(
    pool: workers.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    honest = workers._Process._start

    def start(process: workers._Process) -> object:
        running = honest(process)
        started.append(running.pid)
        if len(started) == 1:
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
        return running

    monkeypatch.setattr(workers._Process, "_start", start)
    first, second = (pool.submit(workers.Task(_ADD, 0, 50)) for _ in range(2))
    assert [difference.status for difference in first.result().differences] == ["aborted"]
    assert not second.result().differences
    assert second.result().total
    assert len(started) == 2


def test_a_unit_that_does_not_come_back_is_called_hung(pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LONGEST_UNIT_S", 0.1)
    verdict = pool.submit(workers.Task(_ADD)).result()
    assert [difference.status for difference in verdict.differences] == ["hung"]


def test_a_quick_task_has_the_first_sample_and_some_others() -> None:
    assert [index for index in range(20) if workers.Task(_ADD, 3, 8).chooses(index)] == [0, 3, 11, 19]


def test_expectations_speak_of_releases_dtypes_and_devices() -> None:
    [found] = parse_expectations(_EXPECTED, "here")
    assert found.covers(_ADD, "cpu")
    assert not found.covers(Unit("add", "float64", Direction.FORWARD), "cpu")
    assert not found.covers(_ADD, "cuda:0")
    assert not parse_expectations(_EXPECTED.replace(">=2.13", "<2.0"), "here")[0].covers(_ADD, "cpu")


@pytest.mark.parametrize(("status", "difference", "explained"), [
    ("rounding", "rounding", True), ("rounding", "values", False), ("values", "rounding", True),
    ("uninitialised", "values", True), ("uninitialised", "metadata", False), ("unsupported", "refused", False),
])
def test_an_expectation_explains_its_own_kind(status: str, difference: str, explained: bool) -> None:
    [found] = parse_expectations(_EXPECTED.replace('"rounding"', f'"{status}"'), "here")
    assert found.explains(Difference(0, difference, "")) is explained


@pytest.mark.parametrize(("old", "new", "said"), [
    ('"rounding"', '"odd"', "status 'odd' is none of values"),
    ('link = "aten', 'link = "somewhere in aten', "neither an address nor a file"),
    ('["float32"]', '["float31"]', "float31"),
    ("torch =", "pytorch =", "pytorch"),
    ('direction = "forward"', 'direction = "sideways"', "sideways"),
    ('reason = "Because of something that is PyTorch\'s."', 'reason = "so"', "reason"),
])
def test_a_mistake_in_the_expectations_is_named(old: str, new: str, said: str) -> None:
    assert old in _EXPECTED
    with pytest.raises(SpecError, match=said):
        parse_expectations(_EXPECTED.replace(old, new), "here")


def test_expectations_name_operators_of_the_database() -> None:
    known = {(unit.operator, unit.direction) for name in database.operators() for unit in units(name)}
    unknown = [item for item in expectations()
               if (item.operator, item.direction) not in known and Expectation.covers(
                   item, Unit(item.operator, item.dtypes[0], item.direction), item.device)]
    assert not unknown
    assert expected(Unit("empty", "float32", Direction.FORWARD), "cpu")


def test_a_published_run_is_read_back_and_shown(tmp_path: Path) -> None:
    run = RunCounts("2.13.0", "3.11.7", "Linux x86_64", "cpu", "2026-11-21", (
        Count("operators", "add", "", "float32", "forward", "served", 9, 1, 10),
        Count("operators", "add", "", "int64", "forward", "served", 5, 0, 5),
        Count("operators", "add", "", "int64", "forward", "in process", 4, 1, 5)))
    report.save(run, tmp_path)
    [path] = list(tmp_path.glob("*.csv"))
    assert report.load(path) == run
    page = report.page([run])
    assert "| direction | dtype | equal, served | different | total | in % | equal, in process |" in page
    assert "| forward | float32 | 9 | 1 | 10 | 90.000 | 0 | 0 | 0 |  |" in page
    assert "| forward | int64 | 5 | 0 | 5 | 100.000 | 4 | 1 | 5 | 80.000 |" in page
    assert "| **forward** | **all** | 14 | 1 | 15 | 93.333 | 4 | 1 | 5 | 80.000 |" in page
    assert "`empty` forward" in page


def test_of_several_sessions_in_one_process_the_worst_is_published(tmp_path: Path) -> None:
    rows = [Count("operators", "add", "", "int64", "forward", "in process", equal, 5 - equal, 5) for equal in (5, 3, 4)]
    counts = tmp_path / "counts.jsonl"
    counts.write_text("".join(f"{json.dumps(attrs.asdict(row))}\n" for row in rows))
    report.main([str(counts), "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    [path] = list(tmp_path.glob("*.csv"))
    assert report.load(path).counts == (rows[1],)


def test_the_published_page_is_what_the_published_results_give() -> None:
    docs = Path(report.__file__).parents[2] / "docs"
    runs = [report.load(path) for path in sorted((docs / "results").glob("conformance-*.csv"))]
    assert runs
    assert (docs / "conformance.md").read_text(encoding="utf-8") == report.page(runs)


@pytest.mark.parametrize(("direction", "least_percent"), [("forward", 99.5), ("backward", 99.0), ("errors", 100.0)])
def test_the_published_results_keep_the_bars(direction: str, least_percent: float) -> None:
    results = Path(report.__file__).parents[2] / "docs" / "results"
    counts = [count for count in report.load(results / "conformance-torch-2.13.0-cpu.csv").counts
              if (count.suite, count.direction) == ("operators", direction)]
    equal, different, total = map(sum, zip(*((count.equal, count.different, count.total) for count in counts),
                                           strict=True))
    assert equal + different == total
    assert 100 * equal / total >= least_percent
