"""The programs of a tenant that took the most time: what they are called, and which of them are kept."""

from __future__ import annotations

import random
from collections import Counter

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Program, Step, Template
from djinn_plugins.executor.program_names import name_of
from djinn_plugins.server.counters import WorkerReport
from djinn_plugins.server.kinds.metrics import MAX_PROGRAM_NAME, MAX_PROGRAMS, Amounts, Counts, ProgramTime
from djinn_plugins.server.metrics_store import MetricsStore
from djinn_plugins.server.program_times import MAX_KNOWN, ProgramTimes, summed

UNKNOWN, DECODE = ExecutionPhase.UNKNOWN, ExecutionPhase.LLM_DECODE


def program(*operators: str) -> Program:
    known = list(dict.fromkeys(operators))
    return Program(tuple(Template(operator, "", ()) for operator in known),
                   tuple(Step(known.index(operator), (), 1) for operator in operators), 0, ())


def test_a_program_is_named_by_what_it_calls_most_often() -> None:
    assert name_of(program("aten::sum")) == "sum"
    assert name_of(program("aten::add_.Tensor", *3 * ["aten::view"], *2 * ["aten::mm"], "aten::relu", "aten::exp",
                           "aten::sum.dim_IntList")) == "2 mm, add_, relu, 5 more"
    assert name_of(program(*2 * ["aten::view"], "aten::t")) == "2 view, t"
    assert name_of(program()) == ""


def test_the_slowest_programs_are_kept_whatever_else_runs() -> None:
    draw, times = random.Random(0), ProgramTimes()
    slow = {(f"slow {number}", UNKNOWN): 1.0 + number for number in range(MAX_PROGRAMS)}
    runs = [*slow.items(), *((("quick", UNKNOWN), 1e-3) for _ in range(100))]
    runs += [((f"once {number}" * 99, DECODE), 1e-4) for number in range(5 * MAX_KNOWN)]
    draw.shuffle(runs)
    for named, seconds in [*slow.items(), *runs]:
        times.add(named, seconds)
        assert len(times._known) <= MAX_KNOWN
    assert [(found.name, found.phase, found.runs, found.total_ns, found.longest_ns) for found in times.slowest()] == [
        (name, phase, 2, int(2e9 * seconds), int(1e9 * seconds))
        for (name, phase), seconds in sorted(slow.items(), key=lambda item: -item[1])]
    quick = ProgramTimes()
    quick.add(("long" * 99, UNKNOWN), 1.0)
    assert [len(found.name) for found in quick.slowest()] == [MAX_PROGRAM_NAME]


def test_tables_are_added_by_name_and_phase() -> None:
    first = (ProgramTime("mm", UNKNOWN, 2, 30, 20), ProgramTime("mm", DECODE, 1, 7, 7))
    second = (ProgramTime("sum", UNKNOWN, 1, 40, 40), ProgramTime("mm", UNKNOWN, 1, 25, 25))
    assert summed((first, second)) == (ProgramTime("mm", UNKNOWN, 3, 55, 25), ProgramTime("sum", UNKNOWN, 1, 40, 40),
                                       ProgramTime("mm", DECODE, 1, 7, 7))
    many = [ProgramTime(f"{number}", UNKNOWN, 1, number, number) for number in range(30)]
    assert [found.total_ns for found in summed((many,))] == list(range(29, 29 - MAX_PROGRAMS, -1))


def test_programs_of_a_worker_that_was_replaced_are_remembered_and_their_names_are_printable() -> None:
    ledger = MetricsStore()
    for runs in (1, 2):
        account = ledger.open("ann", 0)
        account.heed(WorkerReport(Counts(), Amounts(), (ProgramTime("mm\x1b[2J", UNKNOWN, runs, runs * 10, 10),)))
        ledger.close(account)
    ledger.open("bob", 0).heed(WorkerReport(Counts(), Amounts(), (ProgramTime("sum", UNKNOWN, 1, 5, 5),)))
    found = ledger.totals()
    assert found["ann"].programs == (ProgramTime("mm?[2J", UNKNOWN, 3, 30, 10),)
    assert Counter(each.name for each in found["bob"].programs) == {"sum": 1}
