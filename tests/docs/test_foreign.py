"""What is published of other projects' tests is what their reports say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.foreign.chosen import is_chosen, named
from support.foreign.published import UNEXPLAINED, Difference, explained
from support.foreign.suites import Outcome, Suite, compare, outcomes, split_arguments

_REPORT = """<testsuites><testsuite>
<testcase classname="test_a.TestThingsCPU" name="test_add_cpu_float32"/>
<testcase classname="test_a.TestThingsREMOTE_ACCELERATOR" name="test_sub_remote_accelerator_int64">
<failure message="RuntimeError: no&#10;more">trace</failure></testcase>
<testcase classname="test_a.TestThingsPRIVATEUSE1" name="test_cpu_scalar_privateuse1">
<skipped message="Only runs on cuda"/></testcase>
<testcase classname="test_a.TestOrdinary" name="test_cpu"/>
</testsuite></testsuites>"""


def test_tests_of_devices_are_read_without_the_device(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(_REPORT)
    assert outcomes(report, named) == {
        "TestThings.test_add_float32": Outcome("passed"),
        "TestThings.test_sub_int64": Outcome("failed", "RuntimeError: no"),
        "TestThings.test_cpu_scalar": Outcome("skipped", "Only runs on cuda"),
    }


def test_one_failed_subtest_fails_its_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("""<testsuites><testsuite>
<testcase classname="t.T" name="a"/><testcase classname="t.T" name="a"><failure message="no"/></testcase>
<testcase classname="t.T" name="a"/></testsuite></testsuites>""")
    assert outcomes(report, lambda _, name: name) == {"a": Outcome("failed", "no")}


def test_what_only_the_device_runs_counts_by_itself() -> None:
    cpu = {"a": Outcome("skipped"), "b": Outcome("skipped"), "c": Outcome("skipped")}
    device = {"a": Outcome("passed"), "b": Outcome("failed", "why"), "c": Outcome("skipped")}
    result = compare("test_a.py", cpu, device)
    assert (result.cpu_passed, result.more_passed, result.fails_on_both) == (0, 1, 0)
    assert result.not_passed == [Difference("b", "failed", "why")]


def test_a_process_that_ends_early_passes_nothing() -> None:
    result = compare("test_a.py", {"a": Outcome("passed"), "b": Outcome("skipped")}, "ended with -11")
    assert (result.cpu_passed, result.passed) == (1, 0)
    assert result.differences == [Difference("the process", "failed", "ended with -11")]


def test_arguments_of_pytest_come_after_two_dashes() -> None:
    assert split_arguments(["--source", "x", "--", "-k", "a"]) == (["--source", "x"], ["-k", "a"])
    assert split_arguments(["--source", "x"]) == (["--source", "x"], [])


def test_one_test_of_five_is_the_same_one_on_each_device(tmp_path: Path) -> None:
    file = tmp_path / "test_things.py"
    file.write_text("\n".join(f"class TestThings{device.upper()}:\n" + "".join(
        f"    def test_{number}_{device}(self): pass\n" for number in range(200)) for device in ("cpu", "privateuse1")))
    listed = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "support.foreign.chosen",
                             "--one-of", "5", "-c", os.devnull, "--rootdir", tmp_path, file], capture_output=True,
                            text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).stdout
    chosen = Counter(named(*line.split("::")[1:]) for line in listed.splitlines() if "::" in line)
    assert chosen == {f"TestThings.test_{number}": 2 for number in range(200)
                      if is_chosen(f"TestThings.test_{number}", 5)}
    assert 20 < len(chosen) < 70


def test_a_sample_without_a_test_is_no_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_none.py").write_text("def test_one(): pass\n")
    suite = Suite("nothing", "1", tmp_path, lambda _, name: name, {"PYTHONPATH": os.pathsep.join(sys.path)}, {})
    assert suite.run({"none": "test_none.py"}, ["-k", "another"], processes=0) == 0
    assert capfd.readouterr().out == "none: none of these tests passes on the CPU\n"


def test_only_what_passes_on_the_cpu_counts() -> None:
    cpu = {"a": Outcome("passed"), "b": Outcome("passed"), "c": Outcome("failed"), "d": Outcome("passed")}
    device = {"a": Outcome("passed"), "b": Outcome("failed", "why"), "c": Outcome("failed"), "e": Outcome("failed")}
    result = compare("test_a.py", cpu, device)
    assert (result.cpu_passed, result.passed, result.fails_on_both) == (2, 1, 1)
    assert result.differences == [Difference("b", "failed", "why")]


@pytest.mark.parametrize(("message", "is_explained"), [("Only runs on cuda", True), ("an unheard-of error", False)])
def test_a_difference_has_its_reason_or_is_not_explained(message: str, is_explained: bool) -> None:
    found = explained("pytorch", Difference("TestThings.test_b", "skipped" if is_explained else "failed", message))
    assert (found.reason != UNEXPLAINED) is is_explained
