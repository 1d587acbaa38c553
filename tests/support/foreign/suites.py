"""Running other projects' tests with pytest, on the CPU and on a guarded server, and comparing what came of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest
from support.foreign.published import Difference, FileResult, publish
from support.servers.serving import Serving

TEST_TIMEOUT_S = 300
FILE_TIMEOUT_S = 7200


@attrs.frozen
class Outcome:
    """What came of one test."""

    verdict: str
    message: str = ""


@attrs.frozen
class Suite:
    """Tests of another project.

    Attributes:
        name: What the results are published by.
        release: Of the checkout.
        folder: Where pytest runs.
        named: Gives the test of a case in a report a name that does not depend on the device; no name: it is left out.
        cpu: Environment variables of tests on the CPU.
        device: Environment variables of tests on the device, in addition to the server's.
        device_arguments: Arguments of pytest for tests on the device.
        configuration: The file with pytest's configuration.
    """

    name: str
    release: str
    folder: Path
    named: Callable[[str, str], str]
    cpu: Mapping[str, str]
    device: Mapping[str, str]
    device_arguments: Sequence[str] = ()
    configuration: str = os.devnull

    def run(self, files: Mapping[str, str], arguments: Sequence[str], processes: int) -> int:
        """Run files, given by the names that they are published by; publish what came of each.

        Returns:
            0 if each difference has a reason, otherwise 1.
        """
        status, parallel = 0, ["-n", str(processes)]
        with tempfile.TemporaryDirectory() as folder, Serving(Path(folder) / "log") as server:
            for name, file in files.items():
                cpu = self._outcomes(file, self.cpu, [*parallel, *arguments])
                if isinstance(cpu, str):
                    raise SystemExit(f"{file} cannot be run on the CPU: {cpu}")
                if not any(outcome.verdict == "passed" for outcome in cpu.values()):
                    print(f"{name}: none of these tests passes on the CPU", flush=True)
                    continue
                there = self._outcomes(file, {**self.device, "DJINN_SERVER": server.address},
                                       [*self.device_arguments, *parallel, *arguments])
                result = attrs.evolve(compare(name, cpu, there), release=self.release, arguments=arguments)
                print(f"{name}: {result.passed} of {result.cpu_passed} that pass on the CPU", flush=True)
                status |= publish(self.name, result)
        return status

    def _outcomes(self, file: str, environment: Mapping[str, str],
                  arguments: Sequence[str]) -> dict[str, Outcome] | str:
        """Run one file; return what came of its tests, or how the process ended if it left no report."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", file, "-q", "-c", self.configuration, f"--rootdir={self.folder}",
                       "-p", "no:cacheprovider", "-p", "support.foreign.chosen", "-o", "log_cli=0",
                       "--continue-on-collection-errors", f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}",
                       *arguments]
            try:
                done = subprocess.run(command, cwd=self.folder, timeout=FILE_TIMEOUT_S, check=False, text=True,
                                      env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
                                      capture_output=True)
            except subprocess.TimeoutExpired:
                return f"it did not end within {FILE_TIMEOUT_S} s"
            if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                return {}
            # 0 and 1: pytest itself did not fail.
            found = outcomes(report, self.named) if done.returncode in {0, 1} and report.exists() else {}
            return found or f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"


def outcomes(report: Path, named: Callable[[str, str], str]) -> dict[str, Outcome]:
    """Read what came of each test from pytest's report."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # written by pytest a moment ago
        name = named(case.get("classname", "").rpartition(".")[2], case.get("name", ""))
        if not name:
            continue
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        verdict = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        message = "" if bad is None else bad.get("message", "").strip().partition("\n")[0][:200]
        # A test whose subtests fail has a case for each of these.
        if name not in found or verdict == "failed":
            found[name] = Outcome(verdict, message)
    return found


def compare(file: str, cpu: Mapping[str, Outcome], device: Mapping[str, Outcome] | str) -> FileResult:
    """Compare the tests that ran on both; a text instead of outcomes says how a process ended."""
    if isinstance(device, str):
        return FileResult(file, cpu_passed=sum(outcome.verdict == "passed" for outcome in cpu.values()), passed=0,
                          differences=[Difference("the process", "failed", device)], fails_on_both=0)
    both = [name for name in device if name in cpu]
    passed = [name for name in both if cpu[name].verdict == "passed"]
    more = [name for name in both if cpu[name].verdict == "skipped"]

    def differing(names: Sequence[str], *verdicts: str) -> list[Difference]:
        return [Difference(name, device[name].verdict, device[name].message) for name in names
                if device[name].verdict in verdicts]

    differences = differing(passed, "failed", "skipped")
    return FileResult(file, cpu_passed=len(passed), passed=len(passed) - len(differences), differences=differences,
                      fails_on_both=sum(cpu[name].verdict == device[name].verdict == "failed" for name in both),
                      more_passed=sum(device[name].verdict == "passed" for name in more),
                      more_failed=differing(more, "failed"))


def arguments_of(whose: str, named: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of this process: options that all suites have, and after ``--`` those of pytest.

    Args:
        whose: The other project.
        named: What the remaining arguments name.
    """
    parser = argparse.ArgumentParser(epilog="Arguments of pytest follow after --, for example -k and an expression.")
    parser.add_argument("--source", type=Path, required=True, help=f"a checkout of {whose}")
    parser.add_argument("--processes", type=int, default=2, help="that run tests; default: %(default)s")
    parser.add_argument("names", nargs="*", help=f"{named}; those of a fixed list by default")
    own, others = split_arguments(sys.argv[1:])
    return parser.parse_args(own), others


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a program's own arguments from pytest's, which come after ``--``."""
    own = list(arguments)
    return (own[:own.index("--")], own[own.index("--") + 1:]) if "--" in own else (own, [])
