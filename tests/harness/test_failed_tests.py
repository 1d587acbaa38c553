"""The end of a red run names what failed in any of its parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.reports import failed_tests


def report_of(folder: Path, name: str, source: str) -> Path:
    (folder / f"test_{name}.py").write_text(source)
    report = folder / f"{name}.xml"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), "-p",
                    "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}", f"test_{name}.py"],
                   cwd=folder, env=clean, capture_output=True, check=False)
    return report


def test_what_failed_in_any_part_is_named_last(tmp_path: Path) -> None:
    good = report_of(tmp_path, "good", "def test_good(): pass\n")
    bad = report_of(tmp_path, "bad", "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_bad(x):\n"
                                     "    assert x == 1, 'the reason'\n\ndef test_other(nobody): pass\n")
    broken = report_of(tmp_path, "broken", "import nowhere\n")
    empty = report_of(tmp_path, "empty", "")
    assert list(failed_tests.failed_in(good)) == []
    done = subprocess.run([sys.executable, failed_tests.__file__, *map(str, (good, bad, broken, empty)),
                           str(tmp_path / "none.xml")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "5 failed:"
    assert lines[1].startswith("test_bad.py::test_bad[2] - AssertionError: the reason")
    assert lines[2].startswith("test_bad.py::test_other - failed on setup")
    assert "broken" in lines[3]
    assert lines[4] == "empty.xml: no test ran"
    assert lines[5].startswith("none.xml: pytest ended without a report")


def test_a_green_run_ends_without_a_word(tmp_path: Path) -> None:
    good = report_of(tmp_path, "good", "def test_good(): pass\n")
    done = subprocess.run([sys.executable, failed_tests.__file__, str(good)], capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stdout) == (0, "")
