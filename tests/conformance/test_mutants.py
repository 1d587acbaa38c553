"""Faults planted in the product itself are noticed, each by the law that is named for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.mutants.catalogue import MUTANTS
from support.mutants.planting import Mutant

from djinn_conformance import specs

Key = tuple[str, str, tuple[str, ...], str]
"""Name of the mutant, or nothing; and what is looked at."""
LOOKS = {(mutant.law, mutant.within, mutant.over): None for mutant in MUTANTS}


class Verdicts:
    """What a process finds out, in the order in which it does; each test waits for its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read: dict[Key, dict[str, Any]] = {}

    def of(self, name: str, law: str, within: tuple[str, ...], over: str) -> dict[str, Any]:
        """Wait for a verdict."""
        assert self._process.stdout is not None
        while (name, law, within, over) not in self._read:
            line = self._process.stdout.readline()
            assert line, f"it ended with {self._process.wait()} before it had tried {name or law}"
            verdict = json.loads(line)
            self._read[verdict["name"], verdict["law"], tuple(verdict["within"]), verdict["over"]] = verdict
        return self._read[name, law, within, over]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[Verdicts]:
    """What the laws make of the mutants that were asked for, and then of the same calls and programs without them."""
    chosen = {item.callspec.params["mutant"].name: None for item in request.session.items
              if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "mutant" in item.callspec.params}
    looks = [item.callspec.params["look"] for item in request.session.items
             if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "look" in item.callspec.params]
    chosen |= {mutant.name: None for mutant in MUTANTS if (mutant.law, mutant.within, mutant.over) in looks}
    paths = [*filter(None, sys.path)]
    with subprocess.Popen([sys.executable, "-m", "support.mutants", *chosen], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_PROFILE": "ci", "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0", "DJINN_SERVER": "", "DJINN_PLUGINS": ""}) as process:
        # If tests end early, the process ends with the first verdict that nobody reads.
        yield Verdicts(process)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught_by_the_law_named_for_them(mutant: Mutant, verdicts: Verdicts) -> None:
    planted = verdicts.of(mutant.name, mutant.law, mutant.within, mutant.over)
    assert planted["verdict"] == "broken", f"{mutant.law} does not notice it: {planted['message'] or 'it holds'}"


@pytest.mark.parametrize("look", LOOKS, ids=[f"{law}-{number}" for number, (law, _, _) in enumerate(LOOKS)])
def test_laws_hold_for_the_same_calls_without_a_mutant(look: tuple[str, tuple[str, ...], str],
                                                       verdicts: Verdicts) -> None:
    healthy = verdicts.of("", *look)
    assert healthy["verdict"] == "kept", f"{look[0]} does not hold without a mutant: {healthy['message']}"


def test_each_law_of_sessions_has_a_mutant() -> None:
    assert {mutant.law for mutant in MUTANTS} == {law.id for law in specs.kind_spec(specs.SESSION).laws}


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
