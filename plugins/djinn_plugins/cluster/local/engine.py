"""The engine ``local``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import already_running, changes
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, ProgramReport
from djinn_plugins.cluster.local.keeper import KEPT, OTHER_KEEPER
from djinn_plugins.cluster.records import APART_S, KeeperRecord, Records, end_group, is_running

__all__ = ("LocalEngine", "LocalEngines")

TICK_S = 0.05
ENDING_S = 20.0
"""How long the keeper may take, after the time to drain, until it is killed."""
_KEEPER = ("import os, sys; from djinn_plugins.postponing import postpone; postpone('djinn'); "
           "from djinn_plugins.cluster.local.keeper import main; "
           "sys.exit(main(sys.argv[1], lambda line: (os.write(1, line), os.dup2(2, 1))))")
"""The keeper's program. It needs no PyTorch."""


class LocalEngine:
    """Runs the programs of a cluster as processes of this machine; see `djinn_plugins.cluster.kinds.Engine`.

    Args:
        folder: Where the records are.
    """

    def __init__(self, folder: Path) -> None:
        self._records = Records(folder)

    def start(self, spec: ClusterSpec) -> None:
        """Start the process that keeps the programs running."""
        if self.programs():
            raise already_running(spec.name)
        self._records.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._records.log_of("keeper").open("ab") as log,
              subprocess.Popen(  # noqa: S603  # djinn's own program
                  [sys.executable, "-c", _KEEPER, str(self._records.folder)], stdin=subprocess.PIPE,
                  stdout=subprocess.PIPE, stderr=log, start_new_session=True) as keeper):
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                # The variables may be secrets, so the specification goes through a pipe, not through a file.
                keeper.stdin.write(msgspec.json.encode(spec))
                keeper.stdin.close()
            if keeper.stdout.readline() == KEPT:
                # It keeps running when this process ends, so nothing waits for it here.
                keeper.returncode = 0
                return
        if keeper.wait() == OTHER_KEEPER:
            raise already_running(spec.name)
        raise ConfigurationError(f"The cluster {spec.name} cannot be started: {self._said()}",
                                 hint="See whether its folder can be written to.")

    def programs(self) -> list[ProgramReport]:
        """Report the states that the keeper has written, or the programs that it has left behind."""
        if self._records.is_kept:
            keeper = self._records.read()
            return [] if keeper is None else [record.report() for record in keeper.programs]
        return [record.report() for record in self._records.left()]

    def watch(self) -> Iterator[list[ProgramReport]]:
        """Report the states now, and after each change."""
        return changes(self.programs, TICK_S)

    def logs(self, program: str, lines: int) -> list[str]:
        """Return the end of a program's log."""
        if not self._records.log_of(program).exists() and program not in {one.name for one in self.programs()}:
            raise LookupError(f"There is no program {program!r}.")
        return self._records.tail(program, lines)

    def stop(self, drain_s: float) -> None:
        """Ask the keeper to stop; without one, end the programs that it has left behind."""
        keeper = self._records.read()
        if keeper is None:
            return
        self._end_keeper(keeper, drain_s)
        for record in self._records.left():
            end_group(record, drain_s)
        if not self._records.is_kept:
            self._records.remove()

    @staticmethod
    def _end_keeper(keeper: KeeperRecord, drain_s: float) -> None:
        for number, patience_s in ((signal.SIGTERM, drain_s), (signal.SIGTERM, ENDING_S), (signal.SIGKILL, ENDING_S)):
            if not is_running(keeper.pid, keeper.born):
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper.pid, number)
            # Two signals at the same time can be one for the system.
            deadline = time.monotonic() + max(patience_s, APART_S)
            while is_running(keeper.pid, keeper.born) and time.monotonic() < deadline:
                time.sleep(TICK_S)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(keeper.pid, os.WNOHANG)

    def _said(self) -> str:
        return " ".join(self._records.tail("keeper", 1)) or "its keeper did not begin."


class LocalEngines:
    """Opens the engine ``local``; see `djinn_plugins.cluster.kinds.EngineFactory`."""

    name = "local"
    capabilities = ("here",)
    """Its programs run on this machine."""

    def open(self, folder: Path) -> Engine:
        """Open the engine for one cluster."""
        return LocalEngine(folder)
