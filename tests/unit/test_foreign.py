"""What is published of other projects' tests is what their reports say."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.foreign.published import UNEXPLAINED, Difference, explained
from support.foreign.pytorch_tests import Outcome, compare, outcomes

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
    assert outcomes(report) == {
        "TestThings.test_add_float32": Outcome("passed"),
        "TestThings.test_sub_int64": Outcome("failed", "RuntimeError: no"),
        "TestThings.test_cpu_scalar": Outcome("skipped", "Only runs on cuda"),
    }


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
