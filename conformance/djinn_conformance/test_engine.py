"""Laws of engines. The programs are small ones, which do what ``djinn serve`` does in the eyes of an engine."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from djinn.errors import ConfigurationError
from djinn_conformance.assertions import expect, expect_equal, expect_raises
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, EngineFactory, EngineProgram, ProgramReport

TIMEOUT_S = 60.0
KILLED_S = 2.0
_SERVES = """
import os, signal, socket, sys
signal.alarm(300)  # a broken engine may leave it behind
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "starts-another" in sys.argv:
    another = os.fork()
    while not another:
        signal.alarm(300)
        signal.pause()
    print("another", another, file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
listener = socket.create_server(("127.0.0.1", 0))
print("run", os.getpid(), os.environ.get("DJINN_SAMPLE"), file=sys.stderr, flush=True)
print(f"djinn serving tcp://127.0.0.1:{listener.getsockname()[1]}", flush=True)
while True:
    client, _ = listener.accept()
    client.sendall(" ".join(sys.argv[1:]).encode())
    client.close()
"""
_FAILS = "import sys; sys.exit('it is not to be')"
Open = Callable[[], Any]


def program(name: str, *arguments: str, code: str = _SERVES, **variables: str) -> EngineProgram:
    """Return a program that answers each connection with its arguments."""
    return EngineProgram(name, (sys.executable, "-S", "-c", code, *arguments), variables)


@pytest.fixture(scope="module")
def opened(plugin: EngineFactory, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens the engine for another cluster, which is stopped in any case."""

    @contextmanager
    def opened() -> Iterator[tuple[Engine, Path]]:
        folder = tmp_path_factory.mktemp("engine")
        engine = plugin.open(folder)
        try:
            yield engine, folder
        finally:
            engine.stop(0)

    return opened


def when(engine: Engine, is_so: Callable[[list[ProgramReport]], bool], what: str, where: str) -> list[ProgramReport]:
    """Watch an engine until its reports are as expected."""
    deadline = time.monotonic() + TIMEOUT_S
    reports: list[ProgramReport] = []
    for reports in engine.watch():
        if is_so(reports):
            return reports
        if time.monotonic() > deadline:
            break
    expect(False, what, got=reports, wanted=f"that within {TIMEOUT_S:g} s", where=where)
    return reports


def serve(reports: list[ProgramReport]) -> bool:
    """Whether all programs serve."""
    return all(report.state == "serving" for report in reports)


def answer_of(report: ProgramReport) -> str:
    """Connect to a program, and return its answer; empty if nothing accepts connections there."""
    host, _, port = report.address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
            return client.recv(1000).decode()
    except OSError:
        return ""


def exists(pid: int) -> bool:
    """Whether a process still exists a moment after it was killed."""
    deadline = time.monotonic() + KILLED_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process exists; one that has ended and that nothing waits for does not count."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


@law("engine.runs_programs")
def test_runs_programs(subject: Subject, opened: Open) -> None:
    """Start two programs with arguments and a variable."""
    programs = (program("two", "b", "c", DJINN_SAMPLE="x"), program("one", "a"))
    with opened() as (engine, _):
        expect_equal(engine.programs(), [], "programs before the start", str(subject))
        engine.start(ClusterSpec("sample", programs))
        reports = when(engine, serve, "two programs serve", str(subject))
        expect_equal([report.name for report in reports], ["two", "one"], "the names", str(subject))
        expect_equal(list(map(answer_of, reports)), ["b c", "a"], "the arguments of the programs", str(subject))
        expect_equal([engine.logs(report.name, 10) for report in reports],
                     [[f"run {reports[0].pid} x"], [f"run {reports[1].pid} None"]], "their variables", str(subject))


@law("engine.found_again")
def test_found_again(subject: Subject, plugin: EngineFactory, opened: Open) -> None:
    """Open the engine once more."""
    with opened() as (engine, folder):
        engine.start(ClusterSpec("sample", (program("one", "a"),)))
        reports = when(engine, serve, "a program serves", str(subject))
        again = plugin.open(folder)
        expect_equal(again.programs(), reports, "programs of an engine that was opened again", str(subject))
        expect_equal(again.logs("one", 10), engine.logs("one", 10), "logs", str(subject))
        again.stop(5)
        expect_equal((engine.programs(), exists(reports[0].pid)), ([], False), "programs that it has stopped",
                     str(subject))


@law("engine.starts_again")
def test_starts_again(subject: Subject, opened: Open) -> None:
    """Kill a program."""
    with opened() as (engine, _):
        engine.start(ClusterSpec("sample", (program("one", "a"), program("two", "b"))))
        before = when(engine, serve, "two programs serve", str(subject))
        os.kill(before[0].pid, SIGKILL)
        after = when(engine, lambda reports: reports[0].restarts == 1 and serve(reports), "it is started again",
                     str(subject))
        expect(after[0].pid != before[0].pid and "9" in after[0].problem, "the program that was killed", got=after[0],
               wanted=f"another process than {before[0].pid}, and signal 9 as the problem", where=str(subject))
        expect_equal((after[0].name, answer_of(after[0]), after[1]), ("one", "a", before[1]), "the programs",
                     str(subject))


@law("engine.failure_reported")
def test_failure_reported(subject: Subject, opened: Open) -> None:
    """Start a program that ends at once, one that does not exist, and one that serves."""
    programs = (program("one", code=_FAILS), EngineProgram("two", ("/no/such/program",)), program("three", "c"))
    with opened() as (engine, _):
        engine.start(ClusterSpec("sample", programs))
        reports = when(
            engine, lambda reports: [report.state for report in reports] == ["failed", "failed", "serving"],
            "two programs have failed, and one serves", str(subject))
        expect("it is not to be" in reports[0].problem, "the problem of the first", got=reports[0].problem,
               wanted="the end of its log", where=str(subject))
        expect("/no/such/program" in reports[1].problem, "the problem of the second", got=reports[1].problem,
               wanted="the name of the file", where=str(subject))


@law("engine.logs_kept")
def test_logs_kept(subject: Subject, opened: Open) -> None:
    """Read the log of a program that was started again."""
    with opened() as (engine, _):
        engine.start(ClusterSpec("sample", (program("one"),)))
        first = when(engine, serve, "a program serves", str(subject))[0].pid
        os.kill(first, SIGKILL)
        second = when(engine, lambda reports: reports[0].restarts == 1 and serve(reports), "it is started again",
                      str(subject))[0].pid
        lines = [f"run {pid} None" for pid in (first, second)]
        expect_equal([engine.logs("one", 10), engine.logs("one", 1)], [lines, lines[1:]], "the log", str(subject))
        for other in ("two", "../one", ""):
            expect_raises(LookupError, partial(engine.logs, other, 10), f"the log of {other!r}", str(subject))


@law("engine.nothing_left")
def test_nothing_left(subject: Subject, opened: Open) -> None:
    """Stop a program that has started another one, which ignores SIGTERM."""
    with opened() as (engine, _):
        engine.start(ClusterSpec("sample", (program("one", "starts-another"),)))
        (report,) = when(engine, serve, "a program serves", str(subject))
        found = [int(line.split()[1]) for line in engine.logs("one", 10)]
        expect_equal(len(found), 2, "processes of the program", str(subject))
        watching = engine.watch()
        next(watching)
        engine.stop(5)
        expect_equal((engine.programs(), [pid for pid in found if exists(pid)], answer_of(report)), ([], [], ""),
                     "programs, processes and answers after the stop", str(subject))
        *_, last = watching
        expect_equal(last, [], "the last report", str(subject))
        engine.stop(5)
        expect_equal(engine.programs(), [], "programs after a second stop", str(subject))


@law("engine.one_cluster")
def test_one_cluster(subject: Subject, plugin: EngineFactory, opened: Open) -> None:
    """Start twice."""
    with opened() as (engine, folder):
        spec = ClusterSpec("sample", (program("one", "a"),))
        engine.start(spec)
        reports = when(engine, serve, "a program serves", str(subject))
        for each in (engine, plugin.open(folder)):
            expect_raises(ConfigurationError, partial(each.start, spec), "a second start", str(subject))
        expect_equal((engine.programs(), answer_of(reports[0])), (reports, "a"), "programs after that", str(subject))
