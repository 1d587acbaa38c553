"""The command ``djinn cluster`` in tests, and sessions on a cluster whose servers die."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from support.processes.warm import run_djinn
from support.servers.serving import children_of, workers_of
from transformers.generation import BaseStreamer

from djinn_plugins.cluster.asking import trusting
from djinn_plugins.cluster.kinds import Engine, ProgramReport

TIMEOUT_S = 120.0
TOKENS = 12
MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 20000, "n_positions": 64}


class Clusters:
    """The program ``djinn cluster``, with folders of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder / "djinn" / "clusters"
        self._environment = {"XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}

    @contextmanager
    def ended(self) -> Iterator[Self]:
        """End what is left in any case."""
        try:
            yield self
        finally:
            for path in self.folder.glob("*/cluster.json"):
                self.run("cluster", "down", "--name", path.parent.name, "--drain-s", "0")

    def run(self, *words: str, **environment: str) -> Any:
        return run_djinn(*words, **self._environment, **environment)

    def programs(self) -> list[dict[str, Any]]:
        done = self.run("cluster", "status", "--json")
        assert done.returncode == 0, done.stderr
        return [program for cluster in json.loads(done.stdout) for program in cluster["programs"]]

    def drain(self, page: str, server: str, authority: str = "") -> str:
        """Drain a server at the page of the cluster as soon as it is listed, and return what the page says."""
        headers = {"Authorization": f"Bearer {(self.folder / 'lab' / 'key').read_text().strip()}"}
        context = trusting(authority) if authority else None

        def asked(path: str, body: bytes | None = None) -> Any:
            request = urllib.request.Request(f"{page}{path}", body, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                return json.load(answer)

        wait_until(lambda: server in [row["cells"][0] for row in asked("/state")["tables"][0]["rows"]], "not listed")
        return str(asked("/act", json.dumps({"action": "drain", "target": server}).encode())["said"])

    def processes(self, name: str = "lab") -> list[int]:
        """All processes of a cluster of the engine ``local``, the keeper first."""
        keeper = json.loads((self.folder / name / "engine" / "programs.json").read_bytes())["pid"]
        gateways = children_of(keeper)
        return [keeper, *gateways, *(worker for gateway in gateways for worker in workers_of(gateway))]


def wait_until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Killing(BaseStreamer):
    """Ends a process when it is given a token that is not one of the first."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._tokens = 0

    def put(self, value: Any) -> None:
        self._tokens += 1
        if self._tokens == TOKENS // 2:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Nothing is left to do."""


def when(engine: Engine, is_so: Callable[[ProgramReport], Any]) -> ProgramReport:
    """Watch a cluster of one program."""
    seen = []
    for (report,) in engine.watch():
        seen.append(report)
        if is_so(report):
            return report
    raise AssertionError(seen)
