"""Tries mutants, each in a fork of a process that has everything imported and nothing started."""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from hypothesis import Phase, settings
from support.processes.begun import import_begun
from support.processes.examples import prepare

from djinn.session import runtime
from djinn.session.session import Session
from djinn_conformance import laws as kit
from djinn_conformance.compositions import Composition, running
from djinn_conformance.harness import served
from djinn_conformance.program_forms import table
from djinn_conformance.seeding import without_stacks
from djinn_conformance.serving import Servers
from djinn_conformance.subjects import Subject

_LONGEST_S = 600.0
"""For something that hangs; beside busy processes, a trial takes ten times as long as by itself."""
_EXAMPLES = 4000
"""Of which a law about operators takes its share."""
_PROGRAMS = 60
"""Of the law of whole programs; forms are few."""

# Nobody reads the smallest example of what was planted.
kit.PROFILES["ci"] = settings(kit.PROFILES["ci"], max_examples=_EXAMPLES, phases=(Phase.explicit, Phase.generate),  # type: ignore[index]  # declared as read-only
                              report_multiple_bugs=False)

from support.mutants import laws  # noqa: E402  # the suites take the profile when they are imported
from support.mutants.catalogue import MUTANTS  # noqa: E402
from support.mutants.planting import Mutant, plant  # noqa: E402


@attrs.frozen
class Trial:
    """A law that is run, with a mutant or without one: then the name is empty.

    Attributes:
        most: How many examples are enough; 0 for all.
    """

    name: str
    law: str
    within: tuple[str, ...]
    over: str
    planted: Mutant | None = None
    most: int = 0

    @property
    def look(self) -> tuple[str, tuple[str, ...], str]:
        """What it looks at."""
        return self.law, self.within, self.over


def verdicts(chosen: Sequence[Mutant], places: Places) -> Iterator[dict[str, Any]]:
    """Try mutants, and then the same examples, up to the one that gave the last mutant away, without any."""
    needed: dict[tuple[str, tuple[str, ...], str], int] = {}
    planted = [Trial(mutant.name, mutant.law, mutant.within, mutant.over, mutant) for mutant in chosen]
    for trial, verdict in attempts(planted, places):
        needed[trial.look] = max(needed.get(trial.look, 0), verdict["examples"])
        yield verdict
    for _, verdict in attempts([Trial("", *look, most=most) for look, most in needed.items()], places):
        yield verdict


@attrs.frozen
class Places:
    """Servers that were started before all trials: their processes are not those that mutants are planted in."""

    servers: Servers
    addresses: Mapping[str, str]
    """Of those that a plugin for transports serves, by the plugin."""

    @contextmanager
    def session(self, over: str, subject: Subject) -> Iterator[Session]:
        """Run the session of a subject."""
        if over in self.addresses:
            yield runtime.init(self.addresses[over], **subject.registered.value.settings)
            runtime.shutdown()
            return
        with running(subject, self.servers) as session:
            yield session


def _attempt(trial: Trial, places: Places, examples: laws.Examples) -> tuple[str, str]:
    """Say what a law makes of a mutant: ``kept``, ``broken``, or ``unable`` if nothing works at all."""
    try:
        if trial.planted is not None:
            plant(trial.planted)
        subject = laws.subject_of(trial.over)
        with places.session(trial.over, subject) as session:
            if (torch.ones(2, device=session.device) + 1).tolist() != [2.0, 2.0]:
                return "unable", "the session cannot even add"
            try:
                laws.run(trial.law, trial.within, subject, session, examples)
            except laws.Enough:
                return "kept", ""
            except Exception as error:  # whatever a test raises is its verdict
                return "broken", _first_line(error)
            return "kept", ""
    except BaseException as error:  # told to whoever asked for the trial
        return "unable", _first_line(error)


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:600]


def _child(trial: Trial, places: Places, answer: int) -> None:
    """Try, and end without a clean-up that could hang because of what was planted."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    examples = laws.Examples(trial.most)
    os.write(answer, json.dumps([*_attempt(trial, places, examples), examples.count]).encode())
    os._exit(0)


def attempts(waiting: list[Trial], places: Places) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Try everything, as many at a time as there are processors."""
    selector = selectors.DefaultSelector()
    while waiting or selector.get_map():
        while waiting and len(selector.get_map()) < (os.cpu_count() or 1):
            trial = waiting.pop(0)
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                _child(trial, places, writer)
            os.close(writer)
            selector.register(reader, selectors.EVENT_READ, (trial, pid, time.monotonic()))
        ready = {key.fd for key, _ in selector.select(1.0)}
        for fd, key in list(selector.get_map().items()):
            trial, pid, began = key.data
            if fd not in ready and time.monotonic() - began < _LONGEST_S:
                continue
            if fd not in ready:
                os.kill(pid, signal.SIGKILL)
            text = os.read(fd, 65536)
            selector.unregister(fd)
            os.close(fd)
            _, status = os.waitpid(pid, 0)
            verdict, message, examples = json.loads(text) if text else ("unable", f"the process ended with {status}", 0)
            yield trial, {
                "name": trial.name, "law": trial.law, "within": trial.within, "over": trial.over, "verdict": verdict,
                "message": message, "examples": examples, "seconds": round(time.monotonic() - began, 1)}


def _prepare(places: Places, chosen: Sequence[Mutant]) -> None:
    """Have what each process does once done in all forks: it takes as long as many trials do."""
    import_begun(lambda: _begin(places, {mutant.over for mutant in chosen}))
    prepare()
    # No fork looks through, and so copies, what is there already.
    gc.collect()
    gc.freeze()


def _begin(places: Places, overs: Iterable[str]) -> None:
    for over in overs:
        with places.session(over, laws.subject_of(over)) as session:
            (torch.ones(2, device=session.device) + 1).tolist()


def main(names: Sequence[str]) -> None:
    """Try the mutants with these names, or all."""
    torch.set_num_threads(1)
    without_stacks()
    table().programs["ci"] = _PROGRAMS  # type: ignore[index]  # declared as read-only
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with Servers() as servers, ExitStack() as serving:
        addresses = {}
        for over in {mutant.over for mutant in chosen}:
            # What is found and started here is there in all forks.
            composition: Composition = laws.subject_of(over).registered.value
            composition.address(servers)
            if composition.part is not None and composition.part.kind == "transport":
                addresses[over] = serving.enter_context(served(composition.part))
        places = Places(servers, addresses)
        _prepare(places, chosen)
        for verdict in verdicts(chosen, places):
            print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
