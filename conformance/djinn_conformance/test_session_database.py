"""Laws of sessions tested with PyTorch's own database of operator samples: one test per entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import attrs
import pytest

from djinn_conformance.capabilities import declares
from djinn_conformance.compositions import Composition, session_of
from djinn_conformance.database import Difference, Direction, Unit, Verdict, operators, units
from djinn_conformance.expectations import expected
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.serving import Servers
from djinn_conformance.subjects import Subject
from djinn_conformance.tally import record
from djinn_conformance.workers import THREADS, Pool, Task

_MOST_PROCESSES = 8
_SAMPLED = 40
"""In a sampled run: the first sample of each unit, and every this many samples after some other one."""
_DTYPES = 3
"""In a sampled run: the first dtype of an entry, float32, and about one in this many of the others."""

Verdicts = Callable[[str, Direction], list[tuple[Unit, Verdict]]]


def _tasks(operator: str, direction: Direction) -> list[Task]:
    """List the tasks for an entry; in a sampled run, dtypes differ between entries, and samples between units."""
    found = [unit for unit in units(operator) if unit.direction is direction]
    if is_thorough():
        return [Task(unit) for unit in found]
    return [Task(unit, number % 5, _SAMPLED) for index, unit in enumerate(found)
            if (number := sum(map(ord, str(unit)))) % _DTYPES == 0 or not index or unit.dtype == "float32"]


@attrs.define
class _Bench:
    """Submits all chosen entries to the processes before the first verdict is requested."""

    pool: Pool
    waiting: dict[tuple[str, Direction], list[tuple[Unit, Future[Verdict]]]] = attrs.field(factory=dict)

    def submit(self, operator: str, direction: Direction) -> None:
        self.waiting[operator, direction] = [(task.unit, self.pool.submit(task))
                                             for task in _tasks(operator, direction)]

    def verdicts(self, operator: str, direction: Direction) -> list[tuple[Unit, Verdict]]:
        return [(unit, future.result()) for unit, future in self.waiting.pop((operator, direction))]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, subject: Subject, servers: Servers) -> Iterator[_Bench]:
    """Processes that run samples in sessions like the subject's, for all of its chosen tests."""
    composition: Composition = subject.registered.value
    settings = {"server": composition.address(servers, THREADS), **composition.settings}
    # Starting a process takes longer than a tenth of the samples.
    processes = 1 if composition.repeats and not is_thorough() else min(os.cpu_count() or 1, _MOST_PROCESSES)
    made = _Bench(Pool(settings, processes))
    for operator, direction in _chosen(request.session.items, subject):
        made.submit(operator, direction)
    yield made
    made.pool.close()


def _chosen(items: Iterable[pytest.Item], subject: Subject) -> Iterator[tuple[str, Direction]]:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.module.__name__ == __name__:
            params = item.callspec.params
            if params["subject"] == subject:
                yield str(params["operator"]), _DIRECTIONS[item.originalname]


def _check(subject: Subject, bench: _Bench, operator: str, direction: Direction) -> None:
    __tracebackhide__ = True
    faults: list[str] = []
    left_out = total = 0
    for unit, verdict in bench.verdicts(operator, direction):
        unexpected = list(_unexpected(subject, unit, verdict))
        faults += [f"{unit}, sample {found.sample}: {found.status}: {found.message}" for found in unexpected]
        faults += _gone(subject, unit, verdict) if is_thorough() else []
        total += verdict.total
        left_out += verdict.left_out
        different = len(verdict.differences)
        record(suite="operators", name=operator, variant="", dtype=unit.dtype, direction=str(direction),
               session=session_of(subject), equal=verdict.total - different,
               different=different - len(unexpected), total=verdict.total)
    if faults:
        raise AssertionError("\n".join(faults))
    if not total:
        pytest.skip(f"no sample of {operator} is small enough" if left_out else f"{operator} has no sample")


def _unexpected(subject: Subject, unit: Unit, verdict: Verdict) -> Iterator[Difference]:
    wanted = expected(unit, subject.device)
    part = subject.registered.value.part
    approximate = part is not None and declares(part, "approximate")
    for difference in verdict.differences:
        explained = any(expectation.explains(difference) for expectation in wanted)
        if not explained and not (approximate and difference.status == "rounding"):
            yield difference


def _gone(subject: Subject, unit: Unit, verdict: Verdict) -> Iterator[str]:
    for expectation in expected(unit, subject.device):
        if expectation.is_certain and not any(map(expectation.explains, verdict.differences)):
            yield f"{unit}: no sample differs as expected ({expectation.status}); delete the expectation"


def _entries(direction: Direction) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operator", [
        name for name in operators() if any(unit.direction is direction for unit in units(name))])


@law("session.samples_forward")
@_entries(Direction.FORWARD)
def test_samples_forward(subject: Subject, bench: _Bench, operator: str) -> None:
    """Run an entry in every dtype that it supports."""
    _check(subject, bench, operator, Direction.FORWARD)


@law("session.samples_backward")
@_entries(Direction.BACKWARD)
def test_samples_backward(subject: Subject, bench: _Bench, operator: str) -> None:
    """Compute the gradients of an entry's results."""
    _check(subject, bench, operator, Direction.BACKWARD)


@law("session.samples_refused")
@_entries(Direction.ERRORS)
def test_samples_refused(subject: Subject, bench: _Bench, operator: str) -> None:
    """Make an entry's invalid calls."""
    _check(subject, bench, operator, Direction.ERRORS)


_DIRECTIONS = {"test_samples_forward": Direction.FORWARD, "test_samples_backward": Direction.BACKWARD,
               "test_samples_refused": Direction.ERRORS}
