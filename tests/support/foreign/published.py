"""Publishing what came of other projects' tests: docs/results, and the tables of docs/foreign.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
from support.reports.generated_part import with_generated

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "foreign.md"
RESULTS = ROOT / "docs" / "results"
REASONS = ROOT / "specs" / "foreign.toml"
UNEXPLAINED = "not explained"
_COLUMNS = ("pass on the CPU", "pass on the device", "in %", "in % of those that can hold", "skipped on the device",
            "failed", "fail on both", "skipped on the CPU, pass on the device", "fail on the device")


@attrs.frozen
class Difference:
    """A test that passes on the CPU, or is skipped there, and does not pass on the device.

    Attributes:
        test: Its name.
        verdict: ``failed`` or ``skipped``.
        message: What it said.
        reason: Why, by specs/foreign.toml.
        can_hold: Whether it could pass on a device that is neither the CPU nor CUDA.
    """

    test: str
    verdict: str
    message: str
    reason: str = ""
    can_hold: bool = True


@attrs.frozen
class FileResult:
    """What came of one file of tests.

    Attributes:
        file: Its name.
        cpu_passed: Tests that ran on both, and pass on the CPU.
        passed: How many of these pass on the device.
        differences: The others.
        fails_on_both: Tests that fail on the CPU too, and say nothing.
        more_passed: Tests that are skipped on the CPU, and pass on the device.
        more_failed: Tests that are skipped on the CPU, and fail on the device.
        release: The other project's release that the file is of.
        arguments: Those of pytest that chose tests.
    """

    file: str
    cpu_passed: int
    passed: int
    differences: Sequence[Difference]
    fails_on_both: int
    more_passed: int = 0
    more_failed: Sequence[Difference] = ()
    release: str = ""
    arguments: Sequence[str] = ()

    @property
    def not_passed(self) -> list[Difference]:
        """All tests that did not pass on the device, and tell something."""
        return [*self.differences, *self.more_failed]


def explained(suite: str, difference: Difference) -> Difference:
    """Find the reason of a difference, by the first pattern that its test or its message has."""
    told = f"{difference.test}: {difference.verdict}: {difference.message}"
    known = tomllib.loads(REASONS.read_text()).get(suite, [])
    entry = next((entry for entry in known if re.search(entry["pattern"], told)), {"reason": UNEXPLAINED})
    return attrs.evolve(difference, reason=str(entry["reason"]), can_hold=bool(entry.get("can_hold", True)))


def _explain(suite: str, result: FileResult) -> FileResult:
    return attrs.evolve(result, differences=[explained(suite, item) for item in result.differences],
                        more_failed=[explained(suite, item) for item in result.more_failed])


def publish(suite: str, result: FileResult) -> int:
    """Write a file's result, in place of an earlier one, and the page.

    Returns:
        1 if a difference is not explained, otherwise 0.
    """
    release = str(torch.__version__).partition("+")[0]
    path = RESULTS / f"foreign-{suite}-torch-{release}.json"
    explained_result = _explain(suite, result)
    files = {**{earlier.file: earlier for earlier in _earlier(path)}, result.file: explained_result}
    path.write_text(json.dumps({
        "suite": suite, "torch": release, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()} "
                   f"{platform.machine()}", "files": cattrs.unstructure(list(files.values()))}, indent=1) + "\n")
    write_page()
    unexplained = [item for item in explained_result.not_passed if item.reason == UNEXPLAINED]
    for item in unexplained:
        print(f"not explained: {item.test}: {item.verdict}: {item.message}", flush=True)
    return int(bool(unexplained))


def _earlier(path: Path) -> list[FileResult]:
    return cattrs.structure(json.loads(path.read_text())["files"], list[FileResult]) if path.exists() else []


def write_page() -> None:
    """Write the tables anew, from all results."""
    parts = [_section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("foreign-*.json"))]
    PAGE.write_text(with_generated(PAGE.read_text(), "\n".join(parts)))


def _section(found: dict[str, Any]) -> str:
    files = cattrs.structure(found["files"], list[FileResult])
    name = f"foreign-{found['suite']}-torch-{found['torch']}.json"
    releases = ", ".join(dict.fromkeys(result.release for result in files))
    where = f"{found['date']}, {found['machine']}, on a server. Release of the tests: {releases}."
    lines = [f"## {found['suite']}, PyTorch {found['torch']}", "", f"{where} By test: [{name}](results/{name}).", "",
             f"| tests | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]
    lines += [_row(result) for result in files]
    if len(files) > 1:
        lines.append(_row(FileResult(
            "all", sum(result.cpu_passed for result in files), sum(result.passed for result in files),
            [item for result in files for item in result.differences], sum(result.fails_on_both for result in files),
            sum(result.more_passed for result in files), [item for result in files for item in result.more_failed])))
    chosen = Counter(" ".join(result.arguments) for result in files if result.arguments)
    lines += ["", *(f"{count} of the rows: chosen with `{arguments}`." for arguments, count in chosen.items())]
    reasons = Counter((item.reason, item.can_hold) for result in files for item in result.not_passed)
    if reasons:
        lines += ["", "| why a test differs | can it hold? | tests |", "|---|---|---:|",
                  *(f"| {reason} | {'yes' if can_hold else 'no'} | {count} |"
                    for (reason, can_hold), count in reasons.most_common())]
    lines.append("")
    return "\n".join(lines)


def _row(result: FileResult) -> str:
    verdicts = Counter(item.verdict for item in result.differences)
    can_hold = result.cpu_passed - sum(not item.can_hold for item in result.differences)
    return (f"| {result.file} | {result.cpu_passed} | {result.passed} | {_percent(result.passed, result.cpu_passed)} | "
            f"{_percent(result.passed, can_hold)} | {verdicts['skipped']} | {verdicts['failed']} | "
            f"{result.fails_on_both} | {result.more_passed} | {len(result.more_failed)} |")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}"
