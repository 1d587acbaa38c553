"""The actors of a cluster: detached, named after the programs, in a Ray namespace of the cluster."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from djinn_plugins.cluster.keeping import ENDING_S, GROUP_S
from djinn_plugins.cluster.kinds import EngineProgram
from djinn_plugins.cluster.records import KeeperRecord

__all__ = ("Actors", "Answer")

ANSWER_S = 2.0
"""How long an actor may take to answer. One that is being started again does not."""
STOPPING_S = 2 * ENDING_S + GROUP_S
"""How long actors may take to stop their programs, after the time to drain."""
AGAIN_S = 30.0
"""When an actor that could not begin is started again."""
Answer: TypeAlias = KeeperRecord | str | None
"""What an actor has written, why it ended for good, or nothing: it is being started."""


class Actors:
    """The actors of a cluster.

    Args:
        ray: Ray's package, connected.
        namespace: Their Ray namespace.
    """

    def __init__(self, ray: Any, namespace: str) -> None:
        self._ray = ray
        self._namespace = namespace

    def place(self, programs: Sequence[EngineProgram], folder: Path) -> None:
        """Start the actors of programs. Ray chooses nodes with the GPUs, and starts an actor again when it ends."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Ray does not spread actors that ask for nothing.
        nodes = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=True) for node in self._ray.nodes()
                 if node["Alive"] and node["Resources"].get("CPU")]
        turns = itertools.cycle(nodes or ["SPREAD"])
        for program in programs:
            self._ray.remote(_supervisor()).options(
                name=program.name, namespace=self._namespace, lifetime="detached", num_cpus=0, num_gpus=program.gpus,
                scheduling_strategy="SPREAD" if program.gpus else next(turns), max_restarts=-1, max_concurrency=8,
            ).remote(str(folder), msgspec.json.encode(program))

    def answers(self, names: Sequence[str]) -> Mapping[str, Answer]:
        """Ask the actors for their reports."""
        found = {name: self._find(name) for name in names}
        asked = {actor.report.remote(): name for name, actor in found.items() if actor is not None}
        answers: dict[str, Answer] = {
            name: "Ray has ended its actor" if actor is None else None for name, actor in found.items()}
        for answer in self._ready(list(asked), ANSWER_S):
            answers[asked[answer]] = self._read(answer, asked[answer])
        return answers

    def end(self, names: Sequence[str], drain_s: float) -> None:
        """Let the actors stop their programs, and end them."""
        answers = self.answers(names)
        found = {name: actor for name in names if (actor := self._find(name)) is not None}
        self._ready([actor.stop.remote(drain_s) for name, actor in found.items()
                     if isinstance(answers[name], KeeperRecord)], drain_s + STOPPING_S)
        for actor in found.values():
            self._ray.kill(actor)

    def _find(self, name: str) -> Any:
        """Return the handle of an actor; ``None`` if it has ended for good."""
        try:
            return self._ray.get_actor(name, namespace=self._namespace)
        except ValueError:
            return None

    def _ready(self, asked: list[Any], timeout_s: float) -> list[Any]:
        if not asked:
            return []
        ready: list[Any] = self._ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0]
        return ready

    def _read(self, answer: Any, name: str) -> Answer:
        try:
            return _decoder.decode(self._ray.get(answer))
        except self._ray.exceptions.RayTaskError as error:
            return str(error.cause)
        except self._ray.exceptions.RayError as error:
            return None if self._find(name) is not None else str(error)


def _supervisor() -> type:
    """Return the class of the actors. Nodes are sent its code, since the import of its module would import PyTorch."""
    again_s = AGAIN_S

    class Supervisor:
        def __init__(self, folder: str, program: bytes) -> None:
            import os
            import threading
            from pathlib import Path

            self._problem = ""
            try:
                from djinn_plugins.postponing import postpone

                postpone("djinn")
                from djinn_plugins.cluster.ray.supervision import Supervision

                self._supervision = Supervision(Path(folder), program)
            except Exception as error:  # noqa: BLE001  # Ray would never try again
                self._problem = f"{type(error).__name__}: {error}"
                threading.Timer(again_s, os._exit, [1]).start()

        def report(self) -> bytes:
            if self._problem:
                raise RuntimeError(self._problem)
            return self._supervision.report()

        def stop(self, drain_s: float) -> None:
            self._supervision.stop(drain_s)

    return Supervisor


_decoder = msgspec.json.Decoder(KeeperRecord)
