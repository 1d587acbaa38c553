"""What `nox -s chaos -- operators` does to kernels: calls of every overload that the guard allows, changed in meaning.

``DJINN_CHAOS_STATE`` names a folder that keeps what is done; a run that was interrupted goes on there.
``DJINN_CHAOS_TIMES`` says how many times as many calls are made as in an ordinary night: 10 take about an hour.
"""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from support.operators import fuzzer
from support.operators.fuzzer import Found, Settings, allowed, look_everywhere, not_called, own, told, without_form
from support.reports.reliability import RESULTS

from djinn.ir.schema import facts_of
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.allowlist import release
from djinn_plugins.guard.layouts import is_proven

CALLS = 200_000
EACH = 100
PARTS = 12
JUDGED = ("plugins/djinn_plugins/guard", "plugins/djinn_plugins/executor/torch")
"""What decides whether a call is made, and how."""
SEED = datetime.datetime.now(datetime.UTC).date().toordinal()
"""Other calls every night."""
TIMES = int(os.environ.get("DJINN_CHAOS_TIMES", "1"))
NIGHT = (
    Settings(target=40, attempts=800, seconds=60, families=100, seed=SEED),
    # The same kernels without vector instructions.
    Settings(target=24, attempts=500, seconds=40, families=100, seed=-SEED, capability="default"),
    Settings(target=40, attempts=800, seconds=60, families=100, seed=2 * SEED),
)
ROUNDS = tuple(attrs.evolve(each, target=TIMES * each.target, attempts=TIMES * each.attempts,
                            seconds=TIMES * each.seconds) for each in NIGHT)
LAST = Settings(target=240, attempts=4000, seconds=240, families=100, seed=3 * SEED)
"""For overloads that had too few calls, or none with some kind of strides."""
TABLE = RESULTS.parent / f"operators-torch-{release()}-cpu.csv"
STRIDES = {"expanded": ("expanded", "expanded-dim"), "overlapping": ("overlapping",), "transposed": ("transposed",)}
"""What an overload has to be called with whose operands are passed as they lie: names of changes, by kind."""
CHANGES = ("unchanged", "expanded", "expanded-dim", "overlapping", "transposed", "gapped", "empty", "resized", "rank",
           "dtype", "wild", "together", "words", "bits", "shared", "other", "none", "number", "numbers", "flag",
           "scaled", "lifted", "sequence")

SAID = {
    "strides": ("expanded", "expanded-dim", "overlapping", "transposed", "gapped"),
    "sizes": ("empty", "resized", "rank", "scaled", "lifted"), "dtypes": ("dtype", "other", "bits"),
    "elements": ("wild",), "integers together with elements": ("together",), "fields of states": ("words",),
    "flags": ("flag",), "other plain arguments": ("number", "numbers", "none"), "shared memory": ("shared",)}
"""Kinds of changes, for people."""


@pytest.mark.timeout(6 * 3600)
def test_kernels_keep_to_their_memory(tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    assert not fuzzer.obstacle()
    state = os.environ.get("DJINN_CHAOS_STATE")
    kept = Path(state) if state else tmp_path
    names = [*(name for name in allowed() if not without_form(name)), *own()]
    found = look_everywhere(names, ROUNDS, kept / f"operators-{SEED}-{fuzzer.digest(*JUDGED)}",
                            kept / f"calls-{fuzzer.digest()}", PARTS,
                            int(os.environ.get("DJINN_CHAOS_PROCESSES", "2")),
                            lambda found: [*too_few(found, names), *not_strided(found, names)], LAST)
    excluded = not_called()
    lacking, unlaid = too_few(found, names), not_strided(found, names)
    print(f"{len(found.hangs)} calls were stopped:", *map(told, found.hangs), sep="\n")
    print(f"{len(lacking)} overloads with fewer than {EACH} calls that ran: {lacking}")
    print(f"{len(unlaid)} overloads without calls with some kind of strides: {unlaid}")
    print(*map(told, found.findings), sep="\n")
    write_table(found, names)
    assert not found.findings
    assert not lacking
    assert [name for name in excluded if found.ran(name) >= EACH] == []
    assert found.total("ran") >= CALLS
    assert not unlaid
    called = sum(found.ran(name) >= EACH for name in names)
    tell(f"{found.total('ran'):,} calls of {called:,} overloads that ran, each at least {EACH} times, with 1 to 3 "
         f"arguments changed, {found.changed('sequence'):,} of them with two to five more calls behind them, in memory "
         "that begins or ends where tensors do",
         f"0 reads or writes out of bounds, 0 crashes, in {found.seconds / 60:.0f} minutes; changed were "
         f"{said(found)}; {found.total('refused') + found.total('too large'):,} calls refused by the guard, "
         f"{found.total('raised'):,} by the kernels, {found.total('hung')} stopped after 3 s of processor time; "
         f" {len(excluded)} overloads cannot be called")


def said(found: Found) -> str:
    """Say how often each kind of change was made."""
    return ", ".join(f"{words} {sum(map(found.changed, kinds)):,}" for words, kinds in SAID.items())


def too_few(found: Found, names: list[str]) -> dict[str, str]:
    """Name overloads of which too few calls ran, with what was said of one that did not."""
    excluded = fuzzer.not_called()
    return {name: found.overloads[name]["said"] for name in names if found.ran(name) < EACH and name not in excluded}


def not_strided(found: Found, names: list[str]) -> dict[str, dict[str, int]]:
    """Name overloads that are given operands as they lie, and were not called with all kinds of strides."""
    excluded = fuzzer.not_strided()
    lacking = {}
    for name in names:
        operator = operator_named(name)
        facts = facts_of(operator)
        reads = any("Tensor" in str(argument.type) and argument.name not in facts.written
                    for argument in operator._schema.arguments)
        if not is_proven(operator) or not reads or found.ran(name) < EACH or name in excluded:
            continue
        ran_with = found.overloads[name]["ran_with"]
        counts = [sum(ran_with.get(kind, 0) for kind in kinds) for kinds in STRIDES.values()]
        if not all(counts):
            lacking[name] = dict(zip(STRIDES, counts, strict=True))
    return lacking


def write_table(found: Found, names: list[str]) -> None:
    """Write down, for each overload, how many calls ran with what changed."""
    if not os.environ.get("DJINN_CHAOS_RESULTS"):
        return
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["overload", "operands", "ran", "refused", "raised", *CHANGES])
        for name in names:
            entry = found.overloads[name]
            outcomes = entry["outcomes"]
            layout = "as they lie" if is_proven(operator_named(name)) else "made dense"
            refused = outcomes["refused"] + outcomes["too large"]
            writer.writerow([name, layout, outcomes["ran"], refused, outcomes["raised"],
                             *(entry["ran_with"].get(change, 0) for change in CHANGES)])
