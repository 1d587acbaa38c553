"""Running the test of one law within this process, on as little as is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from fnmatch import fnmatchcase
from functools import cache, partial, wraps
from typing import Any
from unittest import SkipTest

from support.mutants.planting import DEFAULTS, SERVED

from djinn.record import devices
from djinn.session.session import Session
from djinn_conformance import (
    modules,
    optimizers,
    test_session_async,
    test_session_compiled,
    test_session_database,
    test_session_known,
    test_session_later,
    test_session_machine,
    test_session_operations,
    test_session_places,
    test_session_programs,
    test_session_pushed,
    test_session_recovery,
    test_session_repeats,
    test_session_served,
    test_session_small_work,
    test_session_switches,
    test_session_training,
)
from djinn_conformance import program_forms as lines
from djinn_conformance.compositions import COMPOSED, composed
from djinn_conformance.database import Verdict, judge
from djinn_conformance.family_groups import Group
from djinn_conformance.laws import law_of
from djinn_conformance.subjects import Subject, installed_plugins, select
from djinn_conformance.workers import Task

_SUITES = (
    test_session_async, test_session_compiled, test_session_database, test_session_known, test_session_later,
    test_session_machine, test_session_operations, test_session_places, test_session_programs, test_session_pushed,
    test_session_recovery, test_session_repeats, test_session_served, test_session_small_work, test_session_switches,
    test_session_training,
)


class Enough(SkipTest):  # no error, but the one exception after which Hypothesis leaves all else alone
    """As many examples as are of interest have been run."""


class Examples:
    """Counts the examples that a law's test runs: of Hypothesis, or whole programs.

    Args:
        most: It is enough after that many; 0 for no limit.
    """

    def __init__(self, most: int = 0) -> None:
        self.count = 0
        self._most = most

    def counted(self, example: Callable[..., Any]) -> Callable[..., Any]:
        """Count the calls of a function.

        Raises:
            Enough: By the function that is returned, at the end of the last call: one that Hypothesis has begun must
                draw what it has drawn before.
        """

        @wraps(example)
        def counting(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            result = example(*arguments, **keywords)
            if self.count == self._most:
                raise Enough
            return result

        return counting


def tests() -> dict[str, Callable[..., None]]:
    """List the tests of all laws of sessions, by law."""
    return {str(law_of(value)): value for suite in _SUITES for value in vars(suite).values() if law_of(value)}


@cache
def subject_of(over: str) -> Subject:
    """Find the session that a mutant is planted in: in this process, unless it is that of a server.

    All forks of this process have what was found before.
    """
    served = over == SERVED
    found = composed(select(DEFAULTS if served else over, *installed_plugins()), COMPOSED,
                     served=served)
    return next(subject for subject in found
                if subject.device in ("", "cpu") and subject.registered.value.served is served)


def run(law: str, within: Sequence[str], subject: Subject, session: Session, examples: Examples) -> None:
    """Run a law's test.

    Args:
        law: The law.
        within: See `mutants.planting.Mutant`.
        subject: What it is run for.
        session: Its running session.
        examples: Counts its examples, if it draws any.

    Raises:
        Enough: There have been enough of them.
        Exception: Whatever the test raises; mostly an AssertionError.
    """
    test: Any = tests()[law]
    given = partial(test, subject=subject, session=session)
    if hasattr(test, "hypothesis"):
        test.hypothesis.inner_test = examples.counted(test.hypothesis.inner_test)
    if test.__module__ == test_session_machine.__name__:
        machine = test_session_machine.Machine
        machine.teardown = examples.counted(machine.teardown)  # type: ignore[method-assign]  # in this process only
        groups: Any = lines.table().groups
        groups.update({name: tuple(form for form in forms if _is_within(f"{name}:{form.text}", within))
                       for name, forms in groups.items()})
        given(record_property=lambda *_: None)
    elif test.__module__ == test_session_database.__name__:
        test_session_database._DTYPES = 1  # all
        for name in within:
            _run_entry(test, subject, name)
    elif test.__module__ == test_session_training.__name__:
        for suite in (optimizers, modules):
            suite.cases = partial(_chosen, suite.cases, within)
        given()
    elif test.__module__ == test_session_recovery.__name__:
        for asks_every in map(int, within):
            given(asks_every=asks_every)
    elif test.__module__ == test_session_async.__name__:
        for loop in within:
            given(loop=loop)
    elif test.__module__ == test_session_repeats.__name__:
        given(group="drawn")
    elif test.__module__ == test_session_known.__name__:
        groups = test_session_known._GROUPS
        groups.update({group: groups[smaller] for group, smaller in (name.split(":") for name in within)})
        given()
    elif test.__module__ in (test_session_compiled.__name__, test_session_later.__name__,
                             test_session_places.__name__, test_session_pushed.__name__,
                             test_session_small_work.__name__, test_session_switches.__name__):
        given()
    else:
        given(group=_group(test, within))


def _group(test: Any, within: Sequence[str]) -> Group:
    """Make a group of the operators that are named, wherever the suite has them."""
    [groups] = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"]
    known = {repr(spec).removeprefix("aten::"): spec for param in groups for spec in param.values[0].operators}
    return Group("of a mutant", tuple(known[name] for name in within))


def _chosen(cases: Callable[..., Iterator[Any]], within: Sequence[str], *args: Any, **kwargs: Any) -> Iterator[Any]:
    return (case for case in cases(*args, **kwargs) if _is_within(str(case), within))


def _is_within(name: str, within: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in within)


class _Here:
    """Judges all samples in this process, where the mutant is."""

    def submit(self, task: Task) -> Future[Verdict]:
        done: Future[Verdict] = Future()
        done.set_result(judge(task.unit, devices.logical_device()))
        return done


def _run_entry(test: Any, subject: Subject, operator: str) -> None:
    bench = test_session_database._Bench(_Here())
    bench.submit(operator, test_session_database._DIRECTIONS[test.__name__])
    test(subject=subject, bench=bench, operator=operator)
