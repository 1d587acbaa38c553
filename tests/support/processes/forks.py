"""Runs tests in forks of the process that has collected them: ``pytest -p support.processes.forks --forks 5``.

pytest-xdist collects again in each of its processes, which takes as long as hundreds of tests. A fork has the tests
already. Each fork runs one file after the other, in order, because tests of one file share servers. Tests that are
marked ``alone`` come last, in a fork beside which no other runs. To other plugins, a fork looks like a process of
pytest-xdist, and its reports come from the process that was started.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import attrs
import pytest
from _pytest.cacheprovider import LFPlugin, NFPlugin
from _pytest.config import create_terminal_writer
from _pytest.junitxml import LogXML
from xdist.remote import serialize_warning_message
from xdist.workermanage import unserialize_warning_message

_PATIENCE_S = 60.0
"""How long a fork that was told to end may take to end its servers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="COUNT", help="Run tests in so many forks.")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks and not config.option.collectonly:
        config.pluginmanager.register(_Forks(config.option.forks))


@attrs.define(eq=False)
class _Fork:
    """A forked process, seen from the one that has collected.

    Attributes:
        given: Positions of the tests that it was given and has not finished.
        is_running: Whether it is at the first of them.
        has_ended: Whether it has said that it is through.
    """

    pid: int
    connection: Connection
    given: deque[int] = attrs.field(factory=deque)
    is_running: bool = False
    has_ended: bool = False


class _Forks:
    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[list[int]] = deque()
        self._running: dict[Connection, _Fork] = {}
        self._started = 0
        self._run = uuid4().hex

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says what happened
        others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        if others:
            raise pytest.UsageError(f"Tests cannot run in forks: collecting them has started the threads {others}.")
        terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # reports of several files alternate
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made once, for all forks
        try:
            self._run_all(session, _by_file(session.items, alone=False), self._count)
            self._run_all(session, _by_file(session.items, alone=True), 1)
        finally:
            self._end()
        return True

    def _run_all(self, session: pytest.Session, files: Iterable[list[int]], count: int) -> None:
        self._waiting.extend(files)
        for _ in range(min(count, len(self._waiting))):
            self._start(session)
        while self._running:
            for connection in wait(list(self._running)):
                assert isinstance(connection, Connection)
                self._listen(session, self._running[connection])
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _start(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        # Both processes would write later what has been buffered until now.
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        name = f"gw{self._started}"
        pid = os.fork()
        if not pid:
            ours.close()
            for other in self._running:
                other.close()
            _become(session, {"workerid": name, "testrunuid": self._run}, theirs)
        theirs.close()
        self._started += 1
        self._running[ours] = _Fork(pid, ours)

    def _listen(self, session: pytest.Session, fork: _Fork) -> None:
        hook = session.config.hook
        try:
            what, *said = fork.connection.recv()
        except (EOFError, ConnectionResetError):
            self._bury(session, fork)
            return
        if what == "next":
            file = self._waiting.popleft() if self._waiting else []
            fork.given.extend(file)
            with suppress(BrokenPipeError):  # it has ended, and is buried later
                fork.connection.send(file)
        elif what == "start":
            fork.is_running = True
            hook.pytest_runtest_logstart(nodeid=said[0], location=said[1])
        elif what == "report":
            self._report(session, hook.pytest_report_from_serializable(config=session.config, data=said[0]))
        elif what == "finish":
            fork.is_running = False
            fork.given.popleft()
            hook.pytest_runtest_logfinish(nodeid=said[0], location=said[1])
        elif what == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs={
                "warning_message": unserialize_warning_message(said[0]), "when": said[1], "nodeid": said[2],
                "location": said[3]})
        else:
            assert what == "end"
            fork.has_ended = True
            hook.pytest_testnodedown(node=SimpleNamespace(workeroutput=said[0]), error=None)

    def _bury(self, session: pytest.Session, fork: _Fork) -> None:
        """See how a fork has ended. If it crashed, its test has failed, and another fork does the rest."""
        del self._running[fork.connection]
        fork.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        if fork.has_ended and not status and not fork.given:
            return
        if fork.is_running:
            item = session.items[fork.given.popleft()]
            self._fail(session, item.nodeid, item.location, f"the process ended with {status} in this test")
        else:
            after = session.items[fork.given[0]].nodeid if fork.given else "the end"
            self._fail(session, f"between two tests, before {after}", ("", None, ""),
                       f"the process ended with {status} between two tests")
        if fork.given:
            self._waiting.appendleft(list(fork.given))
        if self._waiting:
            self._start(session)

    def _fail(self, session: pytest.Session, nodeid: str, location: tuple[str, int | None, str], why: str) -> None:
        self._report(session, pytest.TestReport(nodeid, location, {}, "failed", why, "call"))
        session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _report(self, session: pytest.Session, report: pytest.TestReport) -> None:
        """Report a part of a test; a failure at once by its name, as the end of a long run is far."""
        session.config.hook.pytest_runtest_logreport(report=report)
        if report.failed:
            terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
            terminal.ensure_newline()
            reason = str(report.longrepr).rstrip().rpartition("\n")[2]
            terminal.write_line(f"FAILED {report.nodeid} - {reason}", red=True)

    def _end(self) -> None:
        """End the forks that run, which end their servers."""
        for fork in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        for fork in self._running.values():
            fork.connection.close()
            while not os.waitpid(fork.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(fork.pid, signal.SIGKILL)
                time.sleep(0.01)
        self._running.clear()


def _by_file(items: Sequence[pytest.Item], *, alone: bool) -> Iterator[list[int]]:
    """Give the positions of each file's tests, of those that run alone or of all others.

    They are in no collection of the functions that fork: in the variables of all callers of a test, djinn looks for
    tensors that are asked for next. Among those of ten thousand tests, that took 8 ms each time.
    """
    files: dict[Path, list[int]] = {}
    for position, item in enumerate(items):
        if (item.get_closest_marker("alone") is not None) is alone:
            files.setdefault(item.path, []).append(position)
    yield from files.values()


def _become(session: pytest.Session, identity: dict[str, str], connection: Connection) -> None:
    """Run tests, and end."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        _prepare(session.config, identity)
        reporting = _Reporting(session.config, connection)
        session.config.pluginmanager.register(reporting)
        reporting.has_begun = True
        try:
            _run(session, connection)
        except KeyboardInterrupt:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process that has collected may say it once more
            session.config.hook.pytest_sessionfinish(session=session, exitstatus=pytest.ExitCode.INTERRUPTED)
        else:
            session.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
            connection.send(("end", session.config.workeroutput))  # type: ignore[attr-defined]  # as pytest-xdist has it
            status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _prepare(config: Any, identity: dict[str, str]) -> None:
    """Send nothing but reports."""
    config.workerinput, config.workeroutput = identity, {}
    config.option.forks = 0
    os.environ |= {"PYTEST_XDIST_WORKER": identity["workerid"], "PYTEST_XDIST_TESTRUNUID": identity["testrunuid"]}
    manager = config.pluginmanager
    # Files that keep captured output must not be those of another process.
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    for plugin in list(manager.get_plugins()):
        if isinstance(plugin, (_Forks, LFPlugin, LogXML, NFPlugin)):
            manager.unregister(plugin)
    # Some plugins need a terminal.
    nothing = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # to the end
    manager.getplugin("terminalreporter")._tw = create_terminal_writer(config, nothing)
    temporary = config._tmp_path_factory
    temporary._basetemp = temporary.getbasetemp() / identity["workerid"]
    temporary._basetemp.mkdir(mode=0o700)


def _run(session: pytest.Session, connection: Connection) -> None:
    """Run each file that is given. The next one is asked for before the last test: fixtures may last until then."""

    def given() -> Iterator[pytest.Item]:
        while True:
            connection.send(("next",))
            file: list[int] = connection.recv()
            if not file:
                return
            yield from map(session.items.__getitem__, file)

    items = given()
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


@attrs.define(eq=False)
class _Reporting:
    """Sends reports to the process that has collected.

    Attributes:
        has_begun: Whether a warning is new. Those from before the fork are repeated when this plugin is registered.
    """

    config: pytest.Config
    connection: Connection
    has_begun: bool = False

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.connection.send(("report", self.config.hook.pytest_report_to_serializable(config=self.config,
                                                                                      report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.connection.send(("finish", nodeid, location))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if self.has_begun:
            self.connection.send(("warning", serialize_warning_message(warning_message), when, nodeid,
                                  location))
