"""The runner of tests in forks: what fails, crashes, hangs or is interrupted is reported as such."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.reports.failed_tests import failed_in

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
_FILES = {
    "conftest.py": """
        import os, pathlib, pytest
        @pytest.fixture(scope="session")
        def place(tmp_path_factory):
            yield tmp_path_factory.mktemp("place")
            pathlib.Path("ended").open("a").write(f"{os.getpid()}\\n")
        """,
    "test_kills.py": """
        import os, signal
        def test_before(place): print("said before"); assert os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_after(place): pass
        def test_red(record_property): print("said by a test"); record_property("found", 7); assert 1 == 2
        """,
    "test_hangs.py": """
        import time, pytest
        @pytest.mark.timeout(0.5)
        def test_hangs(): time.sleep(60)
        def test_follows(place, capfd): print("kept"); assert capfd.readouterr().out == "kept\\n"
        """,
    "test_errors.py": """
        import os, pytest, warnings
        @pytest.fixture
        def unable(): raise RuntimeError("unable")
        def test_is_unable(unable): pass
        def test_warns(place): warnings.warn("be careful")
        @pytest.mark.skip(reason="not today")
        def test_is_skipped(): pass
        def test_leaves_nothing():
            with pytest.raises(ChildProcessError): os.waitpid(-1, os.WNOHANG)
        """,
}


@contextmanager
def _pytest(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    for name, text in _FILES.items():
        (folder / name).write_text("\n".join(line.strip() if line.startswith("        import") else line[8:]
                                             for line in text.splitlines()))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "support.processes.forks", "-p", "no:cacheprovider",
             "-p", "no:djinn-conformance", "-p", "no:hypothesispytest", "--forks", "2", "--junitxml=report.xml",
             "-ojunit_family=xunit1", f"--basetemp={folder / 'temporary'}", *arguments],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        yield running
        running.kill()


def test_each_test_is_reported_once_and_as_it_ended(tmp_path: Path) -> None:
    with _pytest(tmp_path) as running:
        said, _ = running.communicate(timeout=120)
    assert running.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert "3 failed, 5 passed, 1 skipped, 1 warning, 1 error" in said, said
    assert "said by a test" in said
    assert "be careful" in said
    at_once = said.partition("= FAILURES =")[0]
    assert "FAILED test_kills.py::test_dies - the process ended with -9 in this test" in at_once, said
    assert "FAILED test_kills.py::test_red - " in at_once, said
    failed = "\n".join(failed_in(tmp_path / "report.xml"))
    assert "test_kills.py::test_dies - the process ended with -9 in this test" in failed
    assert "test_kills.py::test_red - " in failed
    assert "test_hangs.py::test_hangs - Failed: Timeout" in failed
    assert "test_errors.py::test_is_unable - " in failed
    cases = [case.get("name") for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")]
    assert sorted(cases) == sorted(set(cases))
    assert len(cases) == 10
    # The process that was killed ended no fixture; the others did, once each.
    ended = (tmp_path / "ended").read_text().split()
    assert len(ended) == len(set(ended)) == 2


def test_a_crash_between_two_tests_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(
        "import os, pytest\n@pytest.fixture(scope='session', autouse=True)\ndef late():\n    yield\n    os._exit(0)\n"
        "def test_good(): pass\n")
    with _pytest(tmp_path, "test_late.py") as running:
        said, _ = running.communicate(timeout=120)
    assert running.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert "the process ended with 0" in said


def test_what_measures_time_runs_when_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(
        "import pathlib, pytest\n@pytest.mark.alone\n@pytest.mark.parametrize('_', range(2))\n"
        "def test_alone(_):\n    assert len(list(pathlib.Path().glob('ended*'))) == 3\ndef test_together(): pass\n")
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(
            "import pathlib, time\ndef test_together():\n    time.sleep(0.2)\n"
            f"    pathlib.Path('ended{number}').touch()\n")
    with _pytest(tmp_path, "-W", "ignore::pytest.PytestUnknownMarkWarning", "test_first.py",
                 *(f"test_{number}.py" for number in range(3))) as running:
        said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert "6 passed" in said


def test_the_first_failure_ends_a_run_that_asks_for_it(tmp_path: Path) -> None:
    with _pytest(tmp_path, "-x", "test_errors.py") as running:
        said, _ = running.communicate(timeout=120)
    assert running.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert "stopping after 1 failures" in said


def test_ctrl_c_ends_tests_and_what_they_share(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import pathlib, time\ndef test_waits(place):\n    print('waiting')\n    pathlib.Path('waits').write_text('')\n"
        "    time.sleep(60)\n")
    # Processes inherit from a shell without job control that they ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with _pytest(tmp_path, "test_waits.py") as running:
        signal.signal(signal.SIGINT, before)
        while not (tmp_path / "waits").exists():
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == pytest.ExitCode.INTERRUPTED, said
    assert "KeyboardInterrupt" in said
    assert len((tmp_path / "ended").read_text().split()) == 1
