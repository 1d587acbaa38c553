"""The law of whole programs: for any sequence of lines, a session gives the same results as eager."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import seed, settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test

from djinn.session.session import Session
from djinn_conformance.assertions import expect
from djinn_conformance.compositions import is_second
from djinn_conformance.laws import active_profile, as_found, is_thorough, law
from djinn_conformance.machine import FLUSHES, Machine, Statistics
from djinn_conformance.memory_pressure import PressedMachine, pressed
from djinn_conformance.program_forms import table
from djinn_conformance.reading_ahead import ReadingMachine
from djinn_conformance.refusals import leaves_out_overlaps
from djinn_conformance.reuse import ReusingMachine
from djinn_conformance.shared_uploads import SharingMachine, sharing
from djinn_conformance.subjects import Subject

_LINES = 25
_FEWER = 6
_REUSED = 0.2
"""How often per program a repeated line must have reused a result, for the law to be meaningful."""
_PREFETCHED = 0.3
"""How often per program a loop must have fetched in advance, for the law to be meaningful."""
_FORESEEN = 0.1
"""How often per program a value must have been foreseen. It never is where each operation is sent at once."""
_ENOUGH_TO_PREFETCH = 10
_ENOUGH_TO_REUSE = 50
"""With fewer programs, there may happen to be nothing to reuse."""
_TAKEN_AWAY = ("weight", "activation", "unknown", "restored")
_AT_ONCE = 100
"""Hypothesis leads programs that begin alike to the same point again, and gives up if the choices there are different.
That can happen, because leftovers of threads and garbage vary. In that case other programs are drawn, as long as none
differed.
"""
_ENOUGH = 1000
"""From this number of programs on, every form must have had a result, and all counts must be high."""


@law("session.programs_equal")
def test_programs_equal(subject: Subject, session: Session, record_property: Callable[[str, object], None]) -> None:
    """Draw programs, and check that there were enough of every kind."""
    wanted = table().programs[os.environ.get("HYPOTHESIS_PROFILE") or "dev"]
    if subject.registered.value.executors > 1 and not is_thorough():
        # Several executors only change where operations run; and each program takes several times as long.
        wanted = math.ceil(wanted / _FEWER)
    wanted = _sampled(subject, wanted)
    statistics = _run(subject, session, Machine, wanted)
    record_property("djinn_said", f"{statistics}")
    _expect_variety(statistics, wanted, str(subject))


@law("session.reuse_invisible")
def test_reuse_invisible(subject: Subject, session: Session, record_property: Callable[[str, object], None]) -> None:
    """Draw programs that repeat themselves, let the session keep results, and check that it reused some."""
    wanted = _sampled(subject, max(1, table().programs[os.environ.get("HYPOTHESIS_PROFILE") or "dev"] // 2))
    statistics = _run(subject, session, ReusingMachine, wanted)
    record_property("djinn_said", f"{statistics}")
    if wanted < _ENOUGH_TO_REUSE:
        return
    count = statistics.counts["reused"]
    expect(count >= _REUSED * wanted, "repetitions that were reused", got=count,
           wanted=f"at least {_REUSED} in each program", where=str(subject))


@law("session.prefetch_exact")
def test_prefetch_exact(subject: Subject, session: Session, record_property: Callable[[str, object], None]) -> None:
    """Draw programs that read their tensors in loops, and check that values were fetched in advance."""
    wanted = _sampled(subject, max(1, table().programs[os.environ.get("HYPOTHESIS_PROFILE") or "dev"] // 5))
    statistics = _run(subject, session, ReadingMachine, wanted)
    record_property("djinn_said", f"{statistics}")
    if wanted >= _ENOUGH_TO_PREFETCH:
        for name, did, least in (("prefetched", "loops that fetched in advance", _PREFETCHED),
                                 ("foreseen", "rounds in which a value was foreseen", _FORESEEN)):
            count = statistics.counts[name]
            expect(count >= least * wanted, did, got=count, wanted=f"at least {least} in each program",
                   where=str(subject))


@law("session.pressure_invisible")
def test_pressure_invisible(
    subject: Subject, session: Session, record_property: Callable[[str, object], None]
) -> None:
    """Draw programs, evict their values before each command, and check that they were restored."""
    wanted = max(1, table().programs[os.environ.get("HYPOTHESIS_PROFILE") or "dev"] // 2)
    with pressed(session) as pressure:
        # Such an executor always has a guard, wherever it is.
        machine = type("PressedMachine", (PressedMachine,), {"pressure": pressure, "keeps_apart": True})
        statistics = _run(subject, session, machine, wanted)
    record_property("djinn_said", f"{statistics}")
    if wanted < _ENOUGH_TO_REUSE:
        return
    for what in _TAKEN_AWAY:
        count = statistics.counts[f"evicted {what}"]
        expect(count >= wanted, f"{what} that went or came", got=count, wanted="one in each program",
               where=str(subject))


@law("session.sharing_invisible")
def test_sharing_invisible(
    subject: Subject, session: Session, record_property: Callable[[str, object], None]
) -> None:
    """Draw programs, run each in two sessions that share their uploads, and check that they shared some."""
    wanted = max(1, table().programs[os.environ.get("HYPOTHESIS_PROFILE") or "dev"] // 5)
    with sharing(session) as shared:
        machine = type("SharingMachine", (SharingMachine,), {"sharing": shared, "keeps_apart": True})
        statistics = _run(subject, session, machine, wanted)
    record_property("djinn_said", f"{statistics}")
    if wanted >= _ENOUGH_TO_REUSE and sys.platform == "linux":
        count = statistics.counts["shared"]
        expect(count >= wanted, "uploads that were shared", got=count, wanted="one in each program", where=str(subject))


def _sampled(subject: Subject, wanted: int) -> int:
    return math.ceil(wanted / _FEWER) if is_second(subject) else wanted


def _run(subject: Subject, session: Session, machine: type[Machine], wanted: int) -> Statistics:
    """Run a number of programs."""
    if leaves_out_overlaps(subject):
        machine = type(machine.__name__, (machine,), {"keeps_apart": True})
    profile = as_found(active_profile())
    statistics = Statistics()
    for number in itertools.count():
        left = wanted - statistics.programs
        if left <= 0:
            break
        try:
            run_state_machine_as_test(
                _machines(session, machine, statistics, number if profile.derandomize else None),
                settings=settings(profile, max_examples=min(_AT_ONCE, left), stateful_step_count=_LINES))
        except FlakyStrategyDefinition:
            if statistics.different or number > wanted:
                raise
    return statistics


def _machines(session: Session, machine: type[Machine], statistics: Statistics, number: int | None) -> Any:
    """Create the machine's class; ``number`` is the seed of the programs, if they should be the same every time."""

    def make() -> Machine:
        return machine(session, statistics)

    return make if number is None else seed(number)(make)


def _expect_variety(statistics: Statistics, wanted: int, where: str) -> None:
    """Check that the programs have not become trivial."""
    expect(statistics.programs >= wanted, "programs", got=statistics.programs, wanted=f"at least {wanted}", where=where)
    if wanted < _ENOUGH:
        return
    for name, share in table().floors.items():
        count = statistics.counts[name]
        expect(count >= share * wanted, name, got=count, wanted=f"at least {share} in each program", where=where)
    for every in FLUSHES:
        count = statistics.counts[f"flush_every={every}"]
        expect(count >= wanted / 50, f"programs that hand over after {every}", got=count, wanted="more", where=where)
    idle = [form.text for forms in table().groups.values() for form in forms if not statistics.forms[form.text]]
    expect(not idle, "forms that never gave anything", got=idle, wanted="none", where=where)
