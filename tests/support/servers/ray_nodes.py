"""A Ray cluster of two nodes that are processes of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from support.servers.clusters import wait_until
from support.servers.serving import children_of, has_ended

_START = ("-c", "from ray.scripts.scripts import main; main()", "start", "--block", "--disable-usage-stats",
          "--num-cpus=1", "--num-gpus=0", "--object-store-memory=78643200")


class RayNodes:
    """The nodes, within a ``with`` statement; the first one is the head. Ray's tokens are disabled.

    Attributes:
        home: The home folder of their user.
        environment: Variables of programs that use them.
    """

    def __init__(self) -> None:
        # Paths of Ray's sockets must not be long.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self.home = self._folder / "home"
        self.home.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.environment = {"HOME": str(self.home), "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0",
                            "RAY_ADDRESS": f"127.0.0.1:{port}"}
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._start("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder / 'ray'}")
        self._start(f"--address={self.environment['RAY_ADDRESS']}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for node, process in enumerate(self._nodes):
            left = self.processes(node)
            process.terminate()
            process.wait()
            wait_until(lambda left=left: all(map(has_ended, left)), "processes of Ray are left")
        shutil.rmtree(self._folder)

    def _start(self, *options: str) -> None:
        log = self._folder / f"node{len(self._nodes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *_START, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | self.environment)
        self._nodes.append(process)
        wait_until(lambda: process.poll() is not None or b"Ray runtime started" in log.read_bytes(),
                   "Ray does not start")
        assert process.poll() is None, log.read_text()

    def processes(self, node: int) -> list[int]:
        """All processes of a node that are Ray's, without the programs that actors run."""
        found, rest = [], [self._nodes[node].pid]
        while rest:
            pid = rest.pop()
            try:
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                rest += [] if name.startswith(b"ray::") else children_of(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            found.append(pid)
        return found
