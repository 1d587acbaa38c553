"""Runs tests in forks of the process that has collected them: ``pytest -p support.processes.forks --forks 5``.

pytest-xdist collects once more in each of its processes, which takes each of them as long as hundreds of tests. A fork
has the tests already. It takes one file after the other, in order, since tests of one file share servers. To plugins,
a fork looks like a process of pytest-xdist, and its reports come from the process that was started.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from _pytest.cacheprovider import LFPlugin, NFPlugin
from _pytest.config import create_terminal_writer
from _pytest.junitxml import LogXML
from support.processes import warm
from xdist.remote import serialize_warning_message
from xdist.workermanage import unserialize_warning_message

_SINGLE = "_forks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="COUNT", help="Run tests in so many forks.")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks and not config.option.collectonly:
        config.pluginmanager.register(_Forks(config), _SINGLE)


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
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._count = config.option.forks
        self._waiting: deque[list[int]] = deque()
        self._running: dict[Connection, _Fork] = {}
        self._started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says what happened
        others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        if others:
            raise pytest.UsageError(f"Tests cannot run in forks: collecting them has started the threads {others}.")
        positions = range(len(session.items))
        self._waiting.extend(list(files) for _, files in groupby(positions, lambda at: session.items[at].path))
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # files take turns
        warm.share()
        try:
            for _ in range(min(self._count, len(self._waiting))):
                self._start(session)
            while self._running:
                for connection in wait(list(self._running)):
                    self._listen(session, self._running[connection])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for fork in self._running.values():
                os.kill(fork.pid, signal.SIGTERM)
                os.waitpid(fork.pid, 0)
        return True

    def _start(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        # Both processes would say later what has been written until now.
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            stream.flush()
        name = f"gw{self._started}"
        pid = os.fork()
        if not pid:
            ours.close()
            for other in self._running:
                other.close()
            _become(session, name, theirs)
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
            group = self._waiting.popleft() if self._waiting else []
            fork.given.extend(group)
            fork.connection.send(group)
        elif what == "start":
            fork.is_running = True
            hook.pytest_runtest_logstart(nodeid=said[0], location=said[1])
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=said[0])
            hook.pytest_runtest_logreport(report=report)
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
        """See how a fork has ended; blame the test that it was running, and have another one do the rest."""
        del self._running[fork.connection]
        fork.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        if fork.has_ended and not status:
            return
        if not fork.is_running:
            raise RuntimeError(f"a process ended with {status} between two tests; left were {len(fork.given)}")
        item = session.items[fork.given.popleft()]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed",
                                   f"the process ended with {status} in this test", "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if fork.given:
            self._waiting.appendleft(list(fork.given))
        if self._waiting:
            self._start(session)


def _become(session: pytest.Session, name: str, connection: Connection) -> None:
    """Run tests, and end."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _prepare(session.config, name)
        session.config.pluginmanager.register(_Reporting(session.config, connection))
        _run(session, connection)
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        connection.send(("end", session.config.workeroutput))  # type: ignore[attr-defined]  # as pytest-xdist has it
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _prepare(config: Any, name: str) -> None:
    """Let nothing but reports come from here."""
    config.workerinput, config.workeroutput = {"workerid": name}, {}
    config.option.forks = 0
    manager = config.pluginmanager
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    for plugin in list(manager.get_plugins()):
        if isinstance(plugin, (_Forks, LFPlugin, LogXML, NFPlugin)):
            manager.unregister(plugin)
    # Some plugins want a terminal.
    nothing = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # to the end
    manager.getplugin("terminalreporter")._tw = create_terminal_writer(config, nothing)
    temporary = config._tmp_path_factory
    temporary._basetemp = temporary.getbasetemp() / name
    temporary._basetemp.mkdir(mode=0o700)


def _run(session: pytest.Session, connection: Connection) -> None:
    """Run what there is; which test comes next is asked before the last one, as fixtures may last until then."""

    def given() -> Iterator[pytest.Item]:
        while True:
            connection.send(("next",))
            group: list[int] = connection.recv()
            if not group:
                return
            yield from map(session.items.__getitem__, group)

    items = given()
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


@attrs.define(eq=False)
class _Reporting:
    """Sends reports to the process that has collected."""

    config: pytest.Config
    connection: Connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.connection.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.connection.send(("report", self.config.hook.pytest_report_to_serializable(config=self.config,
                                                                                      report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.connection.send(("finish", nodeid, location))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        self.connection.send(("warning", serialize_warning_message(warning_message), when, nodeid, location))
