"""What an actor does on its node: it keeps one program running."""

from __future__ import annotations

import os
import socket
import traceback
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from anyio.from_thread import start_blocking_portal

from djinn_plugins.cluster.keeping import ENDING_S, KeptPrograms, become_subreaper
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram
from djinn_plugins.cluster.records import APART_S, Records, end_group

__all__ = ("Supervision",)


class Supervision:
    """Keeps a program running until it is stopped, or until this process ends.

    If an earlier actor has left the program behind on this machine, it is ended first: it has the port and the GPUs.

    Args:
        folder: The folder of the cluster's records, which all nodes see.
        program: The program, as JSON.

    Raises:
        FileNotFoundError: This node does not see the folder.

    Concurrency:
        `report` and `stop` may be called at the same time.
    """

    def __init__(self, folder: Path, program: bytes) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"The node {socket.gethostname()} has no folder {folder}. Let XDG_STATE_HOME name "
                                    "one that all nodes share.")
        become_subreaper()
        kept = _decoder.decode(program)
        self._records = Records(folder / kept.name)
        self._records.folder.mkdir(mode=0o700, exist_ok=True)
        for left in self._records.left():
            end_group(left, 0)
        # Ray limits the threads to the number of processors that an actor asks for, and these ask for none.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._running = ExitStack()  # until this process ends
        self._portal = self._running.enter_context(start_blocking_portal(name="djinn-supervision"))
        self._kept = self._portal.call(KeptPrograms, self._records, ClusterSpec(kept.name, (kept,)), environment,
                                       self._records.read())
        self._ended: Future[None] = self._portal.start_task_soon(self._kept.run)
        self._ended.add_done_callback(_end_if_failed)

    def report(self) -> bytes:
        """Return the record of the program, as JSON."""
        return msgspec.json.encode(self._records.read())

    def stop(self, drain_s: float) -> None:
        """Stop the program, and return when nothing is left of it.

        Args:
            drain_s: How long its clients have to finish.
        """
        for patience_s in (max(drain_s, APART_S), 2 * ENDING_S):
            self._portal.call(self._kept.stop)
            with suppress(TimeoutError):
                self._ended.result(patience_s)
                return


def _end_if_failed(ended: Future[None]) -> None:
    """End this process if its program is not kept running any more, so that Ray starts the actor again."""
    if (error := ended.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


_decoder = msgspec.json.Decoder(EngineProgram)
