"""What a session shows of things that take long, on a terminal: real processes, pseudo-terminals and signals."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.network.fault_proxy import Bandwidth, FaultProxy, Latency
from support.processes.long_work import LONG, Working
from support.processes.warm import WarmPython, clean_environment

from djinn_plugins.server.tokens.tokens import TokenFile

PROGRAM = "import runpy; runpy.run_module('support.clients.progressing', run_name='__main__')"
TIMEOUT_S = 120
SLOW = Bandwidth(5e6)
TRANSFER = r"{} [\d.,]+ of [\d.,]+ MB, [\d.]+ MB/s, \d+ s left"

pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")


class Terminal:
    """A client whose standard error is a terminal."""

    def __init__(self, case: str, server: str, **environment: str) -> None:
        self._terminal, inner = os.openpty()
        self.process = WarmPython(PROGRAM, [case, server], log=Path(os.ttyname(inner)), environment=clean_environment(
            OMP_NUM_THREADS="1", COLUMNS="100", TERM="xterm", **environment), has_djinn=True)
        self.said = self.process.stdout
        os.close(inner)
        self.shown = ""
        self._text = codecs.getincrementaldecoder("utf-8")()

    def shows(self, pattern: str) -> str:
        """Wait until something is shown."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            self.look(0.1)
            if found := re.search(pattern, self.shown):
                return found.group(0)
            if self.process.poll() is not None:
                break
        pytest.fail(f"{pattern!r} was not shown, but {self.shown!r}")

    def look(self, timeout_s: float = 0.0) -> None:
        while select.select([self._terminal], [], [], timeout_s)[0]:
            try:
                self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._text.decode(os.read(self._terminal, 2**16)))
            except OSError:
                # Linux reports the end of a terminal's other side so.
                return

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def hears(self, *words: str) -> None:
        for word in words:
            line = self.said.readline().strip()
            self.look()
            assert line == word, self.shown

    def close(self) -> None:
        os.close(self._terminal)


@contextmanager
def terminal(case: str, server: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(case, server, **environment)
    with made.process:
        yield made
        made.hears("done")
        assert made.process.wait(TIMEOUT_S) == 0
    made.close()


def wait_until(true: Callable[[], Any]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def slow(server: Any, **faults: Any) -> Iterator[str]:
    with FaultProxy(int(server.address.rpartition(":")[2]), buffer_bytes=2**16, **faults) as proxy:
        yield proxy.address


@pytest.mark.parametrize(("case", "rate"), [("upload", 5e6), ("upload_many", 2e7)])
def test_an_upload_shows_rate_and_time_left_and_can_be_interrupted(server: Any, case: str, rate: float) -> None:
    with slow(server, upstream=[Bandwidth(rate)]) as address, terminal(case, address) as client:
        shown = client.shows(TRANSFER.format("uploading"))
        assert rate / 1e7 < float(re.findall(r"[\d.]+(?= MB/s)", shown)[0]) < rate / 1e5
        client.interrupt()
        client.hears("interrupted", "watched")


def test_a_file_that_the_server_keeps_is_one_transfer_and_the_server_names_it(
        start_server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    server = start_server("--models", str(folder), "--keep-models-mib", "64")
    with slow(server, upstream=[SLOW]) as address, terminal("upload_file", address) as client:
        assert " of 16.8 MB" in client.shows(TRANSFER.format("uploading"))
        client.hears("ended", "watched")
        assert not re.split(r"[\r\n]+", client.shown)[-1].strip()
    (kept,) = folder.glob(".kept/*/*.safetensors")
    assert f"the file {kept.stem} of {kept.stat().st_size} bytes is kept" in server.log.read_text()


def test_a_download_shows_rate_and_time_left_and_can_be_interrupted(server: Any) -> None:
    with slow(server, downstream=[SLOW]) as address, terminal("download", address) as client:
        client.shows(TRANSFER.format("downloading"))
        client.interrupt()
        client.hears("interrupted", "watched")


def test_a_transfer_that_ends_leaves_nothing_on_the_screen(server: Any) -> None:
    with slow(server, upstream=[SLOW]) as address, terminal("upload", address) as client:
        client.shows(TRANSFER.format("uploading"))
        client.hears("ended", "watched")
        lines = re.split(r"[\r\n]+", client.shown)
        assert not lines[-1].strip()


@pytest.mark.parametrize("way", ["tcp", "local"])
def test_a_long_wait_is_shown_and_can_be_interrupted(server: Any, way: str) -> None:
    with terminal("wait", server.address if way == "tcp" else "local://") as client:
        client.shows(r"waiting for (tcp://127.0.0.1:\d+|local://|this process), [1-9]\d* s")
        client.interrupt()
        client.hears("interrupted", "watched")


def test_a_server_that_answers_late_is_shown_and_can_be_interrupted(server: Any) -> None:
    with slow(server, upstream=[Latency(1.7)]) as address, terminal("connect", address) as client:
        client.shows(r"connecting to tcp://127.0.0.1:\d+, [1-9]\d* s")
        client.interrupt()
        client.hears("interrupted", "watched")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_worker_that_starts_is_shown_and_can_be_interrupted(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("alice")
    server = start_server("--tokens", str(tokens.path))
    with terminal("connect", server.address, DJINN_TOKEN=token) as client:
        wait_until(lambda: server.workers)
        (worker,) = server.workers
        os.kill(worker, signal.SIGSTOP)
        try:
            client.shows(r"tcp://127.0.0.1:\d+ is starting a worker, [1-9]\d* s")
            assert "is starting a worker for this session: waiting for it" in client.shown
            client.interrupt()
            client.hears("interrupted")
        finally:
            os.kill(worker, signal.SIGCONT)
        client.hears("watched")


def test_a_queue_on_a_full_server_is_shown_and_can_be_left(start_server: Any) -> None:
    server = start_server("--max-queued", "1")
    with closing(Working(server.address, side=200)) as first:
        # The pace of this program is what the server tells clients to wait.
        first.submit(LONG)
        first.counted()
    with closing(Working(server.address)) as busy:
        busy.submit(LONG)
        with terminal("connect", server.address, DJINN_CONNECT_TIMEOUT_S="60") as client:
            client.shows(r"waiting for room on a server that is full, asked [2-9] times, [1-9]\d* s")
            client.interrupt()
            client.hears("interrupted")
            busy.close()
            client.hears("watched")


def test_short_waits_are_not_shown(server: Any) -> None:
    with terminal("quick", server.address) as client:
        client.hears("ended", "watched")
        assert "djinn:" not in client.shown


def test_nothing_is_shown_if_the_setting_says_so(server: Any) -> None:
    with slow(server, upstream=[SLOW]) as address, terminal("upload", address, DJINN_PROGRESS="0") as client:
        client.hears("ended", "unwatched")
        assert client.shown == ""


def test_nothing_is_written_where_no_terminal_is(server: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slow(server, upstream=[SLOW]) as address, WarmPython(
            PROGRAM, ["upload", address], environment=clean_environment(), log=log, has_djinn=True) as process:
        assert process.stdout.read().split() == ["ended", "unwatched", "done"]
        assert process.wait(TIMEOUT_S) == 0
    assert log.read_text() == ""
