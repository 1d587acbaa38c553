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

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "foreign.md"
RESULTS = ROOT / "docs" / "results"
REASONS = ROOT / "specs" / "foreign.toml"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
UNEXPLAINED = "not explained"


@attrs.frozen
class Difference:
    """A test that passes on the CPU and does not on the device."""

    test: str
    verdict: str
    message: str
    reason: str = ""


@attrs.frozen
class FileResult:
    """What came of one file of tests.

    Attributes:
        file: Its name.
        cpu_passed: Tests that ran on both, and pass on the CPU.
        passed: How many of these pass on the device.
        differences: The others.
        fails_on_both: Tests that fail on the CPU too, and say nothing.
    """

    file: str
    cpu_passed: int
    passed: int
    differences: Sequence[Difference]
    fails_on_both: int


def explained(suite: str, difference: Difference) -> Difference:
    """Find the reason of a difference, by the first pattern that its test or its message has."""
    told = f"{difference.test}: {difference.verdict}: {difference.message}"
    known = tomllib.loads(REASONS.read_text())[suite]
    reason = next((entry["reason"] for entry in known if re.search(entry["pattern"], told)), UNEXPLAINED)
    return attrs.evolve(difference, reason=reason)


def publish(suite: str, results: Sequence[FileResult], arguments: Sequence[str]) -> int:
    """Write the results and the page; return 1 if a difference is not explained, otherwise 0."""
    release = str(torch.__version__).partition("+")[0]
    results = [attrs.evolve(result, differences=[explained(suite, item) for item in result.differences])
               for result in results]
    (RESULTS / f"foreign-{suite}-torch-{release}.json").write_text(json.dumps({
        "suite": suite, "torch": release, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()} "
                   f"{platform.machine()}",
        "arguments": list(arguments), "files": cattrs.unstructure(results)}, indent=1) + "\n")
    write_page()
    return int(any(item.reason == UNEXPLAINED for result in results for item in result.differences))


def write_page() -> None:
    """Write the tables anew, from all results."""
    parts = [_section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("foreign-*.json"))]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(parts) + END + after)


def _section(found: dict[str, Any]) -> str:
    files = cattrs.structure(found["files"], list[FileResult])
    chosen = f"Chosen with `{' '.join(found['arguments'])}`. " if found["arguments"] else ""
    name = f"foreign-{found['suite']}-torch-{found['torch']}.json"
    lines = [f"## {found['suite']}, PyTorch {found['torch']}", "",
             f"{found['date']}, {found['machine']}, on a server. {chosen}By test: [{name}](results/{name}).", "",
             "| file | pass on the CPU | pass on the device | in % | skipped on the device | failed | fail on both |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    for result in files:
        verdicts = Counter(item.verdict for item in result.differences)
        share = 100 * result.passed / max(result.cpu_passed, 1)
        lines.append(f"| {result.file} | {result.cpu_passed} | {result.passed} | {share:.1f} | {verdicts['skipped']} | "
                     f"{verdicts['failed']} | {result.fails_on_both} |")
    reasons = Counter(item.reason for result in files for item in result.differences)
    lines += ["", "| why a test differs | tests |", "|---|---:|",
              *(f"| {reason} | {count} |" for reason, count in reasons.most_common()), ""]
    return "\n".join(lines)
