"""Faults planted in the product itself are noticed, each by the law that is named for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from djinn_conformance import specs
from support.mutants.catalogue import MUTANTS
from support.mutants.planting import Mutant

_TIMEOUT_S = 1800
"""For something that hangs: how long it takes otherwise says how busy the machine is, and nothing else."""


def _key(verdict: Mapping[str, Any]) -> tuple[Any, ...]:
    return verdict["name"], verdict["law"], tuple(verdict["within"]), verdict["over"]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What the laws make of the mutants that were asked for, and of the same calls and programs without them."""
    chosen = [item.callspec.params["mutant"].name for item in request.session.items
              if isinstance(item, pytest.Function) and "mutant" in getattr(item, "fixturenames", ())
              and hasattr(item, "callspec")]
    paths = [*filter(None, sys.path)]
    done = subprocess.run([sys.executable, "-m", "support.mutants", *chosen], capture_output=True, text=True,
                          timeout=_TIMEOUT_S, check=False, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_PROFILE": "ci", "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0", "DJINN_SERVER": "", "DJINN_PLUGINS": ""})
    assert not done.returncode, done.stderr
    return {_key(verdict): verdict for verdict in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught_by_the_law_named_for_them(mutant: Mutant, verdicts: Any) -> None:
    healthy = verdicts["", mutant.law, mutant.within, mutant.over]
    assert healthy["verdict"] == "kept", f"{mutant.law} does not hold without a mutant: {healthy['message']}"
    planted = verdicts[mutant.name, mutant.law, mutant.within, mutant.over]
    assert planted["verdict"] == "broken", f"{mutant.law} does not notice it: {planted['message'] or 'it holds'}"


def test_each_law_of_sessions_has_a_mutant() -> None:
    assert {mutant.law for mutant in MUTANTS} == {law.id for law in specs.kind_spec(specs.SESSION).laws}


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
