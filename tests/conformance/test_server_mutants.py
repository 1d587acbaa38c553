"""Faults planted in a server are noticed by tests of the law that is named for them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from support.mutants.planting import Mutant
from support.mutants.serving import MUTANTS
from support.processes.warm import run_pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_noticed(mutant: Mutant, tmp_path: Path) -> None:
    output = tmp_path / "output"
    status = run_pytest(
        ["-p", "support.mutants.planted", "--mutant", mutant.name, "-p", "no:cacheprovider",
         # Of modules that were imported before the fork.
         "-W", "ignore::pytest.PytestAssertRewriteWarning",
         *(str(TESTS / test) for test in mutant.within)],
        environment=dict(os.environ), folder=TESTS.parent, output=output, timeout_s=300)
    assert status == pytest.ExitCode.TESTS_FAILED, output.read_text()[-3000:]
    # Also a process that could run no test ends so.
    assert re.search(r"^=* ?1 failed in ", output.read_text(), re.MULTILINE), output.read_text()[-3000:]


def test_mutants_are_those_of_a_law_and_have_names_of_their_own() -> None:
    laws = tomllib.loads((TESTS.parent / "specs/server.toml").read_text())["laws"]
    assert {mutant.law for mutant in MUTANTS} <= {law["id"] for law in laws}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
