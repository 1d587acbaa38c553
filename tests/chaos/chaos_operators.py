"""What `nox -s chaos -- operators` does to kernels: calls of every overload that the guard allows, changed in meaning.

``DJINN_CHAOS_STATE`` names a folder that keeps what is done; a run that was interrupted goes on there.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import operator_fuzzing
import pytest
from djinn_guard_core.allowlist import release
from operator_fuzzing import Found, Settings, allowed, look_everywhere, not_called, told, without_form
from reliability import RESULTS

CALLS = 200_000
EACH = 100
PARTS = 24
ROUNDS = (
    Settings(target=75, attempts=1500, seconds=120, seed=1),
    # The same kernels without vector instructions.
    Settings(target=30, attempts=600, seconds=60, seed=2, capability="default"),
)
TABLE = RESULTS.parent / f"operators-torch-{release()}-cpu.csv"
CHANGES = ("unchanged", "expanded", "expanded-dim", "overlapping", "transposed", "gapped", "empty", "resized", "rank",
           "dtype", "wild", "bits", "shared", "other", "none", "number", "scaled")


@pytest.mark.timeout(6 * 3600)
def test_kernels_keep_to_their_memory(tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    assert not operator_fuzzing.obstacle()
    state = os.environ.get("DJINN_CHAOS_STATE")
    folder = (Path(state) if state else tmp_path) / f"operators-{operator_fuzzing.digest()}"
    names = [name for name in allowed() if not without_form(name)]
    found = look_everywhere(names, ROUNDS, folder, PARTS, int(os.environ.get("DJINN_CHAOS_PROCESSES", "2")))
    excluded = not_called()
    lacking = {name: found.overloads[name]["said"] for name in names if found.ran(name) < EACH and name not in excluded}
    print(f"{len(found.hangs)} calls were stopped:", *map(told, found.hangs), sep="\n")
    print(f"{len(lacking)} overloads with fewer than {EACH} calls that ran: {lacking}")
    print(*map(told, found.findings), sep="\n")
    write_table(found, names)
    assert not found.findings
    assert not lacking
    assert [name for name in excluded if found.ran(name) >= EACH] == []
    assert found.total("ran") >= CALLS
    called = sum(found.ran(name) >= EACH for name in names)
    tell(f"{found.total('ran'):,} calls of {called:,} overloads that ran, each at least {EACH} times, with 1 to 3 "
         "arguments changed, in memory that ends where tensors end",
         f"0 reads or writes out of bounds, 0 crashes; {found.total('refused') + found.total('too large'):,} calls "
         f"refused by the guard, {found.total('raised'):,} by the kernels, {found.total('hung')} stopped after 3 s of "
         f"processor time; {len(excluded)} overloads cannot be called, and "
         f"{len(allowed()) - len(names)} take what no program can carry")


def write_table(found: Found, names: list[str]) -> None:
    """Write down, for each overload, how many calls ran with what changed."""
    if not os.environ.get("DJINN_CHAOS_RESULTS"):
        return
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["overload", "ran", "refused", "raised", *CHANGES])
        for name in names:
            entry = found.overloads[name]
            outcomes = entry["outcomes"]
            writer.writerow([name, outcomes["ran"], outcomes["refused"] + outcomes["too large"], outcomes["raised"],
                             *(entry["ran_with"].get(change, 0) for change in CHANGES)])
