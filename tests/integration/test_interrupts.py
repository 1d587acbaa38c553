"""Ctrl-C at the client: it ends the waiting, and cancels what was sent. Real processes get real signals.

The work that is cancelled counts its steps and would take minutes, so that nothing here depends on how fast a machine
is: clients fail if a single step runs that was cancelled, or if all have run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes.warm import WarmPython, clean_environment

CLIENT = "support.clients.interrupted"
TIMEOUT_S = 300
"""Less than the work would take that is cancelled."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="presses Ctrl-C by a signal")


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How to reach a server, by each way there is."""
    if request.param == "local":
        return {"server": "local://"}
    if request.param == "unix":
        folder = request.getfixturevalue("short_folder")
        return {"server": request.getfixturevalue("start_server")("--unix", f"{folder}/to.sock").address}
    if request.param == "tls":
        return {"server": request.getfixturevalue("tls_server").address,
                "tls_ca": request.getfixturevalue("certificates").authority}
    return {"server": request.getfixturevalue("server").address}


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder with a short path: pytest's own may be too deep for a socket."""
    with tempfile.TemporaryDirectory(prefix="djinn-") as folder:
        yield folder


everywhere = pytest.mark.parametrize("settings", ["tcp", "tls", "unix", "local"], indirect=True)
once_each = pytest.mark.parametrize("settings", ["tcp", "local"], indirect=True)
on_servers = pytest.mark.parametrize("settings", ["tcp", "tls", "unix"], indirect=True)


class Client:
    """A client that is told to do something, and can be interrupted."""

    def __init__(self, case: str, settings: dict[str, Any], folder: Path) -> None:
        self._log = folder / "client.log"
        self.process = WarmPython(f"import runpy; runpy.run_module({CLIENT!r}, run_name='__main__')",
                                  [case, json.dumps(settings)], environment=clean_environment(OMP_NUM_THREADS="1"),
                                  log=self._log, has_djinn=True)

    def hears(self, word: str) -> bool:
        """Wait for the next thing that it says."""
        said = self.process.stdout.readline().strip()
        if said != word:
            status = self.process.wait(TIMEOUT_S)
            pytest.fail(f"it said {said!r} and not {word!r}, and ended with {status}:\n{self._log.read_text()}")
        return True

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def ends(self, status: int = 0) -> str:
        """Wait for its end, and return what it has written to standard error."""
        ended = self.process.wait(TIMEOUT_S)
        errors = self._log.read_text()
        assert ended == status, errors
        return errors


@contextmanager
def client(case: str, settings: dict[str, Any]) -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as folder:
        made = Client(case, settings, Path(folder))
        with made.process:
            yield made


def run(case: str, settings: dict[str, Any], times: int = 1) -> None:
    with client(case, settings) as running:
        for _ in range(times):
            running.hears("waits")
            running.interrupt()
            running.hears("interrupted")
        running.hears("done")
        running.ends()


@everywhere
def test_who_waits_is_interrupted_and_what_was_sent_is_cancelled(settings: dict[str, Any]) -> None:
    run("wait", settings, times=2)


@once_each
def test_who_waits_for_everything_is_interrupted(settings: dict[str, Any]) -> None:
    run("synchronize", settings)


def test_a_second_interrupt_while_the_first_has_not_ended_all(server: Any) -> None:
    run("twice", {"server": server.address}, times=2)


def test_a_second_interrupt_while_an_operation_in_this_process_has_not_ended() -> None:
    run("twice_here", {"server": "local://"}, times=2)


def test_work_on_several_servers_is_cancelled_on_each(start_server: Any) -> None:
    # Recovery would let servers work for a few seconds at most before more is sent: little would be left to cancel.
    run("several", {"servers": [start_server().address, start_server().address], "recovery": "none"}, times=2)


def test_work_on_several_executors_in_this_process_is_cancelled_on_each() -> None:
    run("several", {"servers": ["local://", "local://"]}, times=2)


@on_servers
def test_an_upload_that_is_interrupted_leaves_a_session_that_works(settings: dict[str, Any]) -> None:
    run("upload", settings)


@once_each
def test_generating_is_interrupted_and_begins_anew(settings: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    run("generate", settings)


@once_each
def test_a_thread_that_waits_goes_on(settings: dict[str, Any]) -> None:
    run("threads", settings)


@once_each
def test_a_handler_that_raises_nothing_disturbs_nothing(settings: dict[str, Any]) -> None:
    run("own_handler", settings)


@everywhere
def test_exceptions_of_any_handler_at_random_moments_lose_no_session(settings: dict[str, Any]) -> None:
    """``INTERRUPTED_TRIALS=200 INTERRUPTED_SEED=1`` in the environment makes more of them."""
    run("alarms", settings, times=0)


def test_an_exception_that_another_thread_throws_in_loses_no_session(server: Any) -> None:
    run("thrown", {"server": server.address}, times=0)


@everywhere
def test_a_program_that_is_interrupted_twice_ends_and_does_not_abort(settings: dict[str, Any]) -> None:
    with client("leave", settings) as running:
        running.hears("begun")
        running.interrupt()
        running.hears("leaves")
        running.interrupt()
        assert "KeyboardInterrupt" in running.ends(1)


@once_each
def test_interrupts_while_gradients_are_recorded_do_not_abort(settings: dict[str, Any]) -> None:
    run("record", settings, times=50)


@once_each
def test_interrupts_in_the_midst_of_others_do_not_abort(settings: dict[str, Any]) -> None:
    pauses_s = random.Random(0)
    with client("storm", settings) as running:
        running.hears("waits")
        said = threading.Thread(target=running.hears, args=("done",))
        said.start()
        while said.is_alive():
            running.interrupt()
            time.sleep(pauses_s.uniform(0, 0.002))
            running.interrupt()
            time.sleep(pauses_s.uniform(0, 0.02))
        running.ends()


def test_what_was_cancelled_is_not_done_again_by_a_recovery(start_server: Any) -> None:
    server = start_server()
    with client("recover", {"server": server.address, "recovery": "replay", "recovery_budget_s": 3600.0}) as running:
        running.hears("waits")
        running.interrupt()
        running.hears("interrupted")
        running.hears("kill")
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        running.interrupt()
        running.hears("done")
        running.ends()
