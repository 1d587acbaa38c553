"""One law, one test; one test, one law; anything else ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import djinn_conformance
from djinn_conformance import specs
from djinn_conformance.laws import law, laws_by_test, mismatches

_LAW = """
[[laws]]
id = "{identity}"
statement = "Nobody tests this."
source = "nowhere"
"""
_TEST = """

{decorator}
def test_more(subject, plugin):
    pass
"""


@pytest.mark.parametrize("kind", specs.suites())
def test_laws_and_tests_correspond(kind: str) -> None:
    package = Path(djinn_conformance.__file__).parent
    suites = [f"djinn_conformance.{path.stem}" for path in package.glob(f"test_{kind}*.py")]
    assert suites
    assert list(mismatches(specs.kind_spec(kind), laws_by_test(*suites))) == []


def test_an_unknown_law_cannot_be_tested() -> None:
    with pytest.raises(specs.SpecError, match=r"scheduler\.no_such_law"):
        law("scheduler.no_such_law")


def _tamper(package: Path, name: str, text: str) -> None:
    path = package / "djinn_conformance" / name
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(("file", "text", "said"), [
    ("specs/kinds/scheduler.toml", _LAW.format(identity="scheduler.untested"), "law scheduler.untested has no test"),
    ("test_scheduler.py", _TEST.format(decorator=""), "test_more of the kind scheduler tests no law"),
    ("test_scheduler.py", _TEST.format(decorator='@law("scheduler.complete")'),
     "law scheduler.complete is tested by test_complete and test_more"),
    ("test_scheduler.py", _TEST.format(decorator='@law("pattern.known_nodes")'),
     "test_more tests pattern.known_nodes, which is no law of the kind scheduler"),
])
def test_a_run_ends_where_they_do_not_correspond(
    kit: Any, copied_package: Callable[[], Path], file: str, text: str, said: str
) -> None:
    package = copied_package()
    _tamper(package, file, text)
    outcome = kit.run("--djinn-plugin=scheduler:single", package=package)
    assert outcome.status == pytest.ExitCode.USAGE_ERROR, outcome.output
    assert said in outcome.output
    assert not any("passed" in laws.values() for laws in outcome.laws.values())


def test_a_kind_without_a_suite_ends_the_run(kit: Any, copied_package: Callable[[], Path]) -> None:
    package = copied_package()
    (package / "djinn_conformance" / "test_observer.py").unlink()
    outcome = kit.run("--djinn-plugin=scheduler:single", package=package)
    assert outcome.status == pytest.ExitCode.USAGE_ERROR, outcome.output
    assert "the kind observer has laws and no suite test_observer.py" in outcome.output


def test_an_untouched_copy_runs_from_its_own_specifications(kit: Any, copied_package: Callable[[], Path]) -> None:
    outcome = kit.run("--djinn-plugin=scheduler:single", package=copied_package())
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert "10 laws kept" in outcome.output
