"""An engine that keeps every law, and others that do not. Their programs are children of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from djinn.errors import ConfigurationError
from djinn.hookspecs import hookimpl
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram, ProgramReport

BROKEN: dict[str, tuple[str, set[str]]] = {
    "drops-variables": ("engine.runs_programs", set()),
    "knows-its-own": ("engine.found_again", set()),
    "starts-once": ("engine.starts_again", {"engine.logs_kept"}),
    "hides-failures": ("engine.failure_reported", set()),
    "truncates-logs": ("engine.logs_kept", set()),
    "leaves-children": ("engine.nothing_left", set()),
    "starts-twice": ("engine.one_cluster", set()),
}
"""Name of each broken engine, the law that it breaks, and others that it may break as a consequence."""
TICK_S = 0.01
_clusters: dict[Any, list[_Kept]] = {}


@attrs.define(eq=False)
class _Kept:
    program: EngineProgram
    log: Path
    flaw: str
    report: ProgramReport
    is_stopping: threading.Event = attrs.field(factory=threading.Event)
    thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = threading.Thread(target=self.keep, daemon=True)
        self.thread.start()

    def keep(self) -> None:
        while not self.is_stopping.is_set():
            self.run()
            if self.flaw == "starts-once":
                return
            self.report = attrs.evolve(self.report, restarts=self.report.restarts + 1)
            self.is_stopping.wait(0.1)

    def run(self) -> None:
        variables = {} if self.flaw == "drops-variables" else self.program.variables
        with self.log.open("wb" if self.flaw == "truncates-logs" else "ab") as log:
            try:
                process = subprocess.Popen(self.program.command, stdout=subprocess.PIPE, stderr=log,
                                           env=os.environ | variables, start_new_session=True)
            except OSError as error:
                self.report = attrs.evolve(self.report, state="failed", problem=str(error))
                return
        self.report = attrs.evolve(self.report, pid=process.pid)
        assert process.stdout is not None
        with process, process.stdout:
            threading.Thread(target=self.end, args=[process], daemon=True).start()
            words = process.stdout.readline().split()
            if words:
                self.report = attrs.evolve(self.report, state="serving", address=words[-1].decode())
            process.wait()
            if self.flaw != "leaves-children":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        problem = f"it ended with {process.returncode}: {self.log.read_text()[-200:]}"
        if self.flaw == "hides-failures":
            problem = f"it ended with {process.returncode}"
        self.report = attrs.evolve(self.report, state="starting" if words else "failed", pid=0, address="",
                                   problem=problem)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            if self.is_stopping.wait(TICK_S):
                process.terminate()
                return


class _Engine:
    def __init__(self, flaw: str, folder: Path) -> None:
        self._flaw = flaw
        self._folder = folder
        self._key = (flaw, id(self) if flaw == "knows-its-own" else folder)

    def start(self, spec: ClusterSpec) -> None:
        if self.programs() and self._flaw != "starts-twice":
            raise ConfigurationError("It runs already.")
        _clusters[self._key] = _clusters.get(self._key, []) + [
            _Kept(program, self._folder / program.name, self._flaw, ProgramReport(program.name, "starting"))
            for program in spec.programs]

    def programs(self) -> list[ProgramReport]:
        return [kept.report for kept in _clusters.get(self._key, [])]

    def watch(self) -> Iterator[list[ProgramReport]]:
        while reports := self.programs():
            yield reports
            if not all(kept.thread.is_alive() for kept in _clusters.get(self._key, [])):
                break
            time.sleep(TICK_S)
        yield []

    def logs(self, program: str, lines: int) -> list[str]:
        if program not in [report.name for report in self.programs()]:
            raise LookupError(program)
        return (self._folder / program).read_text().splitlines()[-lines:]

    def stop(self, drain_s: float) -> None:
        programs = _clusters.get(self._key, [])
        for kept in programs:
            kept.is_stopping.set()
        for kept in programs:
            kept.thread.join()
        _clusters.pop(self._key, None)


class _Factory:
    capabilities = ("here",)

    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, folder: Path) -> _Engine:
        return _Engine(self._flaw, folder)


@hookimpl
def djinn_register_engines(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))
