"""Calibration: measures the speed of the connected executor and of the connection to it."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import torch

from djinn.errors import DjinnError, PluginError, PluginValidationError
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.graph.analysis import annotate_graph
from djinn_plugins.graph.capture import capture
from djinn_plugins.schedule import profiles as kept
from djinn_plugins.schedule.fitting import Measured, MeasuredCall, fit
from djinn_plugins.schedule.placing import pinned, placing_of
from djinn_plugins.schedule.profiles import Calibration
from djinn_plugins.schedule.schedule import LinkProfile
from djinn_plugins.schedule.workloads import Workload

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("calibrate", "profiles")

LINK_BYTES = 8 << 20
"""Bytes sent and fetched to measure a link's bandwidth."""
LINK_TURNS = 5
ROUND_TRIPS = 30
WARM_RUNS = 2
"""An executor parses a program at its first run, and compiles it at its second."""
RUNS = 3
_Advance = Callable[[str], None]


def calibrate(executor: int = 0, *, seconds: float = 10.0, save: bool = True) -> Calibration:
    """Measure a connected executor and the links to it, by running the installed workloads.

    Everything recorded before runs first. The session's values and random numbers stay unchanged.

    Args:
        executor: Index of the session's executor, from 0.
        seconds: How long to repeat workloads, those with the largest spread first. Each workload is run a few times
            regardless of this limit.
        save: Whether to save the result for later sessions. Otherwise, only this session uses it.

    Returns:
        The result. Predictions of this session, and of later ones with the same executor, use it.

    Raises:
        PluginError: No workloads are installed.
        PluginValidationError: A plugin registered an object that is not a workload.
        TransportError: The connection broke.
        OSError: The file cannot be written.
    """
    session, began = runtime.current(), perf_counter()
    workloads = _registered(session)
    remote = session.backend.executors[executor]
    with (_undisturbed(session), torch.no_grad(), _progress(len(workloads) + 1) as advance,
          pinned(session, executor) as device):
        down, up = _links(session, device)
        advance("link")
        trials = _Trials(session, device)
        for workload in workloads:
            trials.run(workload)
            advance(workload.name)
        while perf_counter() - began < seconds and (doubtful := trials.most_doubtful()) is not None:
            trials.run(doubtful)
        empty_s = trials.empty_s()
    profile = fit(trials.measured(), empty_s=empty_s, run_s=max(empty_s - down.latency_s - up.latency_s, 0.0))
    found = Calibration(kept.identity_of(remote), profile, down, up, perf_counter() - began,
                        tuple(f"{name}: {why}" for name, why in trials.skipped.items()))
    kept.use_calibration(session, found)
    placing = placing_of(session.backend)
    if placing is not None:
        placing.learn(executor, found.profile, found.home_link, _peer_links(session, executor))
    if save:
        kept.save(found)
    return found


def profiles() -> Mapping[str, Calibration]:
    """Return the assumed speed of the session's executors, by address.

    Results of `calibrate`, now or earlier, are used; the others are defaults and marked as such.
    """
    session = runtime.current()
    return {remote.address: kept.calibration_of(session, index)
            for index, remote in enumerate(session.backend.executors)}


def _registered(session: Session) -> list[Workload]:
    found: dict[str, Workload] = {}

    def register(workload: Workload) -> None:
        if not isinstance(workload, Workload):
            raise PluginValidationError(f"A {type(workload).__name__} was registered as a workload.",
                                        hint="Register a djinn_plugins.schedule.workloads.Workload.")
        if workload.name in found:
            raise PluginValidationError(f"Two workloads are called {workload.name!r}.", hint="Rename one of them.")
        found[workload.name] = workload

    session.plugins.hook.djinn_register_workloads(register=register)
    if not found:
        raise PluginError("There are no workloads to measure with.", hint="Enable the plugin djinn-workloads-core.")
    return [found[name] for name in sorted(found)]


@contextlib.contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    """Disable automatic submission, so that only explicit requests are sent."""
    session.synchronize()
    every = session.config.flush_every
    session.flush_after(None)
    try:
        yield
    finally:
        session.flush_after(every)


class _Trials:
    """The workloads that were run, and their times.

    Attributes:
        skipped: Workloads that the executor could not run, and why.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self.skipped: dict[str, str] = {}
        self._session = session
        self._device = device
        self._written = torch.zeros(1, device=device)
        self._trials: dict[str, _Trial] = {}

    def run(self, workload: Workload) -> None:
        """Run a workload a few times."""
        known = self._trials.get(workload.name)
        try:
            run = workload.prepare(self._device)
            calls = _calls(run) if known is None else known.calls
            for _ in range(WARM_RUNS):
                self._seconds(run)
            taken = [self._seconds(run) for _ in range(RUNS)]
        except DjinnError:
            raise
        except Exception as error:  # noqa: BLE001  # reported in the result: devices may lack operations or memory
            self.skipped[workload.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        self._trials[workload.name] = _Trial(workload, calls, (*(known.taken if known else ()), *taken))

    def most_doubtful(self) -> Workload | None:
        """Return the workload to run next: of those that were run least often, the one with the largest spread."""
        trials = self._trials.values()
        return min(trials, key=lambda trial: (len(trial.taken), -trial.spread)).workload if trials else None

    def measured(self) -> list[Measured]:
        """Return the results."""
        return [Measured(name, trial.calls, trial.seconds) for name, trial in self._trials.items()]

    def empty_s(self) -> float:
        """Time a run that does nothing, including the round trip."""
        return statistics.median(self._seconds(lambda: None) for _ in range(ROUND_TRIPS))

    def _seconds(self, run: Callable[[], Any]) -> float:
        """Time one run, without its recording.

        The run writes something first, because an idle executor does not run programs with writes ahead. No value is
        fetched: its answer may come before the rest of the program has run.
        """
        self._written.zero_()
        results = run()
        begin = perf_counter()
        self._session.synchronize()
        taken = perf_counter() - begin
        del results
        self._session.flush()
        return taken


@attrs.frozen
class _Trial:
    """All runs of one workload so far."""

    workload: Workload
    calls: tuple[MeasuredCall, ...]
    taken: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The fastest run: where others compute, the thread that runs it waits for the processor after each message."""
        return min(self.taken)

    @property
    def spread(self) -> float:
        """The spread of its runs."""
        return max(self.taken) / min(self.taken)


def _calls(run: Callable[[], Any]) -> tuple[MeasuredCall, ...]:
    """Record a run, and derive what its operations compute and move."""
    with capture(modules=False) as captured:
        results = run()
    annotated = annotate_graph(captured.graph)
    del results
    return tuple(MeasuredCall(node.operation, float(meaning.flops), float(meaning.bytes_read + meaning.bytes_written),
                              meaning.memory_pattern)
                 for node in captured.graph.nodes() for meaning in (annotated.nodes[node.id],))


def _peer_links(session: Session, executor: int) -> dict[int, LinkProfile]:
    """Measure the links from one executor of a session to the others."""
    found = {}
    for other in range(len(session.backend.executors)):
        if other != executor:
            small, large = (_sending_s(session, executor, other, size) for size in (1, LINK_BYTES // 4))
            found[other] = LinkProfile(small, LINK_BYTES / max(large - small, 1e-9), is_measured=True)
    return found


def _sending_s(session: Session, source: int, target: int, elements: int) -> float:
    """Time the transfer of a value between executors, without the time that reading it there takes."""
    taken = []
    for _ in range(LINK_TURNS):
        with pinned(session, source) as device:
            value = torch.zeros(elements, device=device)
        session.synchronize()
        for timed in (True, False):
            begin = perf_counter()
            with pinned(session, target) as device:
                value.to(device).sum()
            session.synchronize()
            taken.append(perf_counter() - begin if timed else begin - perf_counter())
    # The second time, the value is already there.
    return max(2 * statistics.fmean(taken), 1e-6)


def _links(session: Session, device: torch.device) -> tuple[LinkProfile, LinkProfile]:
    """Measure both directions of the link to the executor: half a round trip each, and the bandwidth."""
    trips = []
    for _ in range(ROUND_TRIPS):
        begin = perf_counter()
        session.synchronize()
        trips.append(perf_counter() - begin)
    trip_s = statistics.median(trips)
    sent: list[float] = []
    fetched: list[float] = []
    for turn in range(LINK_TURNS):
        # Different bytes each time, because a server may keep earlier uploads.
        data = torch.full((LINK_BYTES // 4,), float(turn))
        begin = perf_counter()
        there: LazyTensor = session.upload(data, device)
        session.synchronize()
        sent.append(perf_counter() - begin)
        begin = perf_counter()
        session.materialize([there])
        fetched.append(perf_counter() - begin)
    return _link(trip_s, fetched), _link(trip_s, sent)


def _link(trip_s: float, taken: Sequence[float]) -> LinkProfile:
    carrying_s = max(statistics.median(taken) - trip_s, 1e-9)
    return LinkProfile(trip_s / 2, LINK_BYTES / carrying_s, is_measured=True)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[_Advance]:
    """Show progress on an interactive terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrating", total=steps)
        yield lambda name: bar.update(task, advance=1, description=name)
