"""Calibration: how fast the connected executor and the way to it are, measured."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from djinn import runtime
from djinn.analysis import annotate_graph
from djinn.capture import capture
from djinn.errors import DjinnError, PluginError, PluginValidationError
from djinn.model.schedule import LinkProfile
from djinn.planning import profiles as kept
from djinn.planning.fitting import Call, Measured, fit
from djinn.planning.profiles import Calibration
from djinn.planning.workloads import Workload
from djinn.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session import Session

__all__ = ("calibrate", "profiles")

LINK_BYTES = 8 << 20
"""What is sent and fetched to see how much a link carries."""
LINK_TURNS = 5
ROUND_TRIPS = 30
WARM_RUNS = 2
"""An executor reads a program at its first run, and makes it ready at its second."""
MIN_RUNS = 3
PASSES = 2
"""Each workload is measured so often, at different times; the quicker one counts, the other was disturbed."""
_Advance = Callable[[str], None]


def calibrate(*, seconds: float = 8.0, save: bool = True) -> Calibration:
    """Measure the connected executor and the link to it, by running what the installed workloads say.

    Everything that was recorded before runs first. Values and random numbers of the session stay as they are.

    Args:
        seconds: About how long it may take; slow executors and many workloads take longer, because each is run a few
            times at least.
        save: Whether to keep what was found, for sessions to come. Without it, only this session knows.

    Returns:
        What was found. Predictions of this session and of later ones with the same executor use it.

    Raises:
        PluginError: No workloads are installed.
        PluginValidationError: What a plugin registered is no workload.
        TransportError: The connection broke.
        OSError: The file cannot be written.
    """
    session, began = runtime.current(), time.perf_counter()
    workloads = _registered(session)
    with _undisturbed(session), torch.no_grad(), _progress(len(workloads) * PASSES + 1) as advance:
        down, up = _links(session)
        advance("link")
        runs: dict[str, Measured] = {}
        skipped: dict[str, str] = {}
        clock = _Clock(session)
        for turn in range(PASSES):
            # What begins, and the link, take their time as well.
            share_s = (seconds - (time.perf_counter() - began)) / (PASSES - turn) / len(workloads)
            for workload in workloads:
                _measure(clock, workload, share_s, runs, skipped)
                advance(workload.name)
    profile = fit(tuple(runs.values()), run_s=max(clock.run_s() - down.latency_s - up.latency_s, 0.0),
                  empty_s=clock.run_s())
    found = Calibration(identity := kept.identity_of(session.link), profile, down, up, time.perf_counter() - began,
                        tuple(f"{name}: {why}" for name, why in skipped.items()))
    session.calibrations[identity] = found
    if save:
        kept.save(found)
    return found


def profiles() -> Mapping[str, Calibration]:
    """Return how fast the session's executors are thought to be, by address.

    What `calibrate` has measured, now or earlier, is used; the rest are defaults, and say so.
    """
    session = runtime.current()
    return {session.link.address: session.calibration()}


def _registered(session: Session) -> list[Workload]:
    found: dict[str, Workload] = {}

    def register(workload: Workload) -> None:
        if not isinstance(workload, Workload):
            raise PluginValidationError(f"A {type(workload).__name__} was registered as a workload.",
                                        hint="Register a djinn.planning.workloads.Workload.")
        if workload.name in found:
            raise PluginValidationError(f"Two workloads are called {workload.name!r}.", hint="Rename one of them.")
        found[workload.name] = workload

    session.plugins.hook.djinn_register_workloads(register=register)
    if not found:
        raise PluginError("There are no workloads to measure with.", hint="Enable the plugin djinn-workloads-core.")
    return [found[name] for name in sorted(found)]


@contextlib.contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    """Let nothing be handed over but what is asked for."""
    session.synchronize()
    every = session.config.flush_every
    session.flush_after(None)
    try:
        yield
    finally:
        session.flush_after(every)


class _Clock:
    """Times runs. Each writes something first: what writes is not run ahead by an executor that has nothing to do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._written = torch.zeros(1, device=runtime.logical_device())
        self._empty: list[float] = []

    def seconds(self, run: Callable[[], Any]) -> float:
        """Time one run, without its recording."""
        self._written.zero_()
        results = run()
        begin = time.perf_counter()
        self._session.synchronize()
        taken = time.perf_counter() - begin
        del results
        self._session.flush()
        return taken

    def run_s(self) -> float:
        """Return what a run takes that does nothing, the way there and back included."""
        while len(self._empty) < ROUND_TRIPS:
            self._empty.append(self.seconds(lambda: None))
        return statistics.median(self._empty)


def _measure(
    clock: _Clock, workload: Workload, share_s: float, runs: dict[str, Measured], skipped: dict[str, str]
) -> None:
    """Run one workload for its share of the time, and note the median unless an earlier one was quicker."""
    if workload.name in skipped:
        return
    clock.run_s()
    try:
        run = workload.prepare(runtime.logical_device())
        known = runs.get(workload.name)
        calls = _calls(run) if known is None else known.calls
        deadline = time.perf_counter() + share_s
        for _ in range(WARM_RUNS):
            clock.seconds(run)
        taken: list[float] = []
        while len(taken) < MIN_RUNS or time.perf_counter() < deadline:
            taken.append(clock.seconds(run))
    except DjinnError:
        raise
    except Exception as error:  # noqa: BLE001  # told in the result: devices lack operations, and memory
        skipped[workload.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        runs.pop(workload.name, None)
        return
    median = statistics.median(taken)
    if known is None or median < known.seconds:
        runs[workload.name] = Measured(workload.name, calls, median)


def _calls(run: Callable[[], Any]) -> tuple[Call, ...]:
    """Record a run, and read off what its operations compute and move."""
    with capture(modules=False) as captured:
        results = run()
    annotated = annotate_graph(captured.graph)
    del results
    return tuple(Call(node.operation, float(meaning.flops), float(meaning.bytes_read + meaning.bytes_written),
                      meaning.memory_pattern)
                 for node in captured.graph.nodes() for meaning in (annotated.nodes[node.id],))


def _links(session: Session) -> tuple[LinkProfile, LinkProfile]:
    """Measure the way from the executor and the way to it: half a round trip each, and what they carry."""
    trips = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        session.synchronize()
        trips.append(time.perf_counter() - begin)
    trip_s = statistics.median(trips)
    sent: list[float] = []
    fetched: list[float] = []
    for turn in range(LINK_TURNS):
        # Other bytes each time: a server may keep what it was sent before.
        data = torch.full((LINK_BYTES // 4,), float(turn))
        begin = time.perf_counter()
        there: LazyTensor = session.upload(data)
        session.synchronize()
        sent.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        session.materialize([there])
        fetched.append(time.perf_counter() - begin)
    return _link(trip_s, fetched), _link(trip_s, sent)


def _link(trip_s: float, taken: Sequence[float]) -> LinkProfile:
    carrying_s = max(statistics.median(taken) - trip_s, 1e-9)
    return LinkProfile(trip_s / 2, LINK_BYTES / carrying_s, is_measured=True)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[_Advance]:
    """Show how far it is, where somebody looks."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrating", total=steps)
        yield lambda name: bar.update(task, advance=1, description=name)
