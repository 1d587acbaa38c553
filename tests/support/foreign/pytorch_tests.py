"""Runs PyTorch's own test files on the device, against the same tests on the CPU, and publishes what differs.

``python -m support.foreign.pytorch_tests --source CHECKOUT [FILE ...] [-- ARGUMENTS]``: arguments are pytest's, for
example ``-k TestViewOps``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs
from support.foreign.published import Difference, FileResult, publish
from support.servers.serving import Serving

DEVICE = Path(__file__).with_name("pytorch_device.py")
FILES = ("test_view_ops.py", "test_indexing.py", "test_shape_ops.py", "test_type_promotion.py",
         "test_sort_and_select.py", "test_tensor_creation_ops.py", "test_reductions.py", "test_binary_ufuncs.py",
         "test_torch.py", "test_nn.py", "test_autograd.py", "test_optim.py")
TIMEOUT_S = 120
_DEVICE_TYPES = "privateuse1,remote_accelerator"
"""PyTorch's class of tests has the second name from the first file's first class on."""
_DEVICE_IN_NAME = re.compile(r"^(.*)_(cpu|privateuse1|remote_accelerator)(?=_|$)")
_DEVICE_IN_CLASS = re.compile(r"(CPU|PRIVATEUSE1|REMOTE_ACCELERATOR)$")


@attrs.frozen
class Outcome:
    """What came of one test."""

    verdict: str
    message: str = ""


def outcomes(report: Path) -> dict[str, Outcome]:
    """Read the outcomes of tests that are made for each device, by their names without the device."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # written by pytest a moment ago
        name, test_class = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
        if not _DEVICE_IN_CLASS.search(test_class):
            continue
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        verdict = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        message = "" if bad is None else bad.get("message", "").strip().partition("\n")[0][:200]
        test = _DEVICE_IN_NAME.sub(r"\1", name)
        found[f"{_DEVICE_IN_CLASS.sub('', test_class)}.{test}"] = Outcome(verdict, message)
    return found


def run(source: Path, file: str, environment: Mapping[str, str], arguments: Sequence[str]) -> dict[str, Outcome] | str:
    """Run one file; return what came of its tests, or how the process ended if it left no report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", file, "-q", "-c", os.devnull, f"--rootdir={source / 'test'}",
             "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", f"--junitxml={report}", *arguments],
            cwd=source / "test", env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}, check=False,
            capture_output=True, text=True)
        return outcomes(report) if report.exists() else f"ended with {done.returncode}: {done.stdout[-300:]}"


def compare(file: str, cpu: Mapping[str, Outcome], device: Mapping[str, Outcome]) -> FileResult:
    """Compare the tests that ran on both."""
    both = [name for name in device if name in cpu]
    passed = [name for name in both if cpu[name].verdict == "passed"]
    differences = [Difference(name, device[name].verdict, device[name].message) for name in passed
                   if device[name].verdict != "passed"]
    return FileResult(file, cpu_passed=len(passed), passed=len(passed) - len(differences), differences=differences,
                      fails_on_both=sum(cpu[name].verdict == device[name].verdict == "failed" for name in both))


def main() -> None:
    """Run the files, served, and publish what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of PyTorch, of the installed release")
    parser.add_argument("files", nargs="*", help="names below test/; those of a fixed list, if they are there")
    own, arguments = sys.argv[1:], list[str]()
    if "--" in own:
        own, arguments = own[:own.index("--")], own[own.index("--") + 1:]
    options = parser.parse_args(own)
    source = options.source.absolute()
    files = options.files or [file for file in FILES if (source / "test" / file).exists()]
    if not files:
        raise SystemExit(f"{source / 'test'} has none of {', '.join(FILES)}.")
    results = []
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder) / "log") as server:
        device = {"TORCH_TEST_DEVICES": str(DEVICE), "PYTORCH_TESTING_DEVICE_ONLY_FOR": _DEVICE_TYPES,
                  "DJINN_SERVER": server.address}
        for file in files:
            cpu = run(source, file, {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}, arguments)
            there = run(source, file, device, arguments)
            if isinstance(cpu, str):
                raise SystemExit(f"{file} cannot be run on the CPU: it {cpu}")
            results.append(compare(file, cpu, there) if not isinstance(there, str) else FileResult(
                file, cpu_passed=sum(outcome.verdict == "passed" for outcome in cpu.values()), passed=0,
                differences=[Difference("the process", "failed", there)], fails_on_both=0))
            print(f"{file}: {results[-1].passed} of {results[-1].cpu_passed} that pass on the CPU", flush=True)
    raise SystemExit(publish("pytorch", results, arguments))


if __name__ == "__main__":
    main()
