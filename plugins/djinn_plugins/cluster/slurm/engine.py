"""The engine ``slurm``."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import msgspec

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import claim
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, EngineProgram, ProgramReport
from djinn_plugins.cluster.records import APART_S, ProgramRecord, Records, replace_file
from djinn_plugins.cluster.slurm.jobs import KEEPER, JobState, cancel, check_commands, states, submit
from djinn_plugins.cluster.slurm.node import SPEC

__all__ = ("SlurmEngine", "SlurmEngines")

TICK_S = 0.1
"""How often files of the programs are read."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How often Slurm is asked: more seldom the longer nothing changes."""
ENDING_PAUSE_S = 2.0
ENDING_S = 15.0
"""How long a program may take to end after a second SIGTERM."""
KILLED_S = 120.0
"""How long Slurm may take to end jobs."""


class _Submitted(msgspec.Struct):
    """A program and its job."""

    program: str
    job: int


class _Jobs(msgspec.Struct):
    """The jobs of a cluster, as their file lists them."""

    programs: list[_Submitted] = []
    is_stopping: bool = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of the jobs."""
        return [each.job for each in self.programs]


class SlurmEngine:
    """Runs each program as a job of Slurm; see `djinn_plugins.cluster.kinds.Engine`.

    A job runs a process that keeps its program running, so that nothing has to run where the cluster was started, and a
    program that ends is started again at once, on the node that it has. Slurm itself starts the job again when its node
    fails or another job takes it.

    Args:
        folder: Where the records are; its path is the same on all nodes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "jobs.json"

    def start(self, spec: ClusterSpec) -> None:
        """Submit a job for each program."""
        claim(self._file, spec.name)
        jobs = _Jobs()
        try:
            for program in spec.programs:
                folder = self._records(program.name).folder
                folder.mkdir(mode=0o700, exist_ok=True)
                without = attrs.evolve(program, variables={})
                replace_file(folder / SPEC, msgspec.json.encode(ClusterSpec(spec.name, (without,))))
                jobs.programs.append(_Submitted(program.name, self._submit(spec, program, folder)))
                self._write(jobs)
        except BaseException:
            cancel(jobs.numbers)
            self._remove()
            raise

    @staticmethod
    def _submit(spec: ClusterSpec, program: EngineProgram, folder: Path) -> int:
        return submit(f"djinn-{spec.name}-{program.name}", program, folder)

    def programs(self) -> list[ProgramReport]:
        """Report the states that Slurm and the processes on the nodes give."""
        jobs = self._read()
        return self._reports(jobs, states(jobs.numbers)) if jobs.programs else []

    def watch(self) -> Iterator[list[ProgramReport]]:
        """Report the states now, and after each change."""
        last: list[ProgramReport] | None = None
        asked: list[int] = []
        found: Mapping[int, JobState] = {}
        next_s, pause_s = 0.0, FIRST_PAUSE_S
        while last != []:
            jobs = self._read()
            if jobs.programs and (jobs.numbers != asked or time.monotonic() >= next_s):
                # Slurm's controller may be away for a while; its jobs continue.
                with contextlib.suppress(*([ConfigurationError] if found else [])):
                    found = states(jobs.numbers)
                asked, next_s, pause_s = jobs.numbers, time.monotonic() + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
            now = self._reports(jobs, found)
            if now != last:
                yield now
                last, pause_s = now, FIRST_PAUSE_S
            else:
                time.sleep(TICK_S)

    def logs(self, program: str, lines: int) -> list[str]:
        """Return the end of a program's log; before it has one, that of its job."""
        if program not in {each.program for each in self._read().programs}:
            raise LookupError(f"There is no program {program!r}.")
        return self._tail(program, lines)

    def stop(self, drain_s: float) -> None:
        """End the jobs: as the programs do on SIGTERM, and in the end by force."""
        jobs = self._read()
        jobs.is_stopping = True
        if jobs.programs:
            self._write(jobs)
        said = ""
        for options, patience_s in ((("--signal=TERM", "--batch"), drain_s), (("--signal=TERM", "--batch"), ENDING_S),
                                    ((), KILLED_S)):
            left = self._left(jobs)
            if not left:
                break
            # For a suspended job, `scancel --signal` tries again for a minute and a half, and then fails.
            waiting = [job for job, state in left.items() if state.is_waiting]
            said = " ".join([cancel(waiting), cancel([job for job in left if job not in waiting], *options)]).strip()
            self._await_end(jobs, max(patience_s, APART_S))
        if left := self._left(jobs):
            raise ConfigurationError(
                f"The jobs {', '.join(map(str, left))} do not end: {said or 'Slurm takes long.'}",
                hint="See `squeue`, and stop the cluster again.")
        self._remove()

    @staticmethod
    def _left(jobs: _Jobs) -> dict[int, JobState]:
        found = states(jobs.numbers) if jobs.programs else {}
        return {job: state for job, state in found.items() if not state.has_ended}

    def _await_end(self, jobs: _Jobs, patience_s: float) -> None:
        deadline, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while self._left(jobs) and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, ENDING_PAUSE_S)

    def _reports(self, jobs: _Jobs, found: Mapping[int, JobState]) -> list[ProgramReport]:
        reports = [self._report(each, found.get(each.job)) for each in jobs.programs]
        return [attrs.evolve(report, state="stopping") for report in reports] if jobs.is_stopping else reports

    def _report(self, submitted: _Submitted, state: JobState | None) -> ProgramReport:
        place, keeper = f"job {submitted.job}", self._records(submitted.program).read()
        record = ProgramRecord(submitted.program) if keeper is None else keeper.programs[0]
        if state is None or state.has_ended:
            ended = "unknown to Slurm" if state is None else state.name
            said = "\n".join(self._tail(submitted.program, 5))
            return ProgramReport(submitted.program, "failed", "", place, 0, record.restarts,
                                 f"its job {submitted.job} has ended, {ended}: {said}")
        if state.is_waiting:
            return ProgramReport(submitted.program, "starting", "", f"{place}, {state.name} ({state.reason})", 0,
                                 record.restarts, record.problem)
        is_here = state.node == socket.gethostname().partition(".")[0]
        return attrs.evolve(record.report(), place=f"{place} on {state.node}", pid=record.pid if is_here else 0)

    def _records(self, program: str) -> Records:
        return Records(self._folder / program)

    def _tail(self, program: str, lines: int) -> list[str]:
        records = self._records(program)
        return records.tail(program, lines) or records.tail(KEEPER, lines)

    def _read(self) -> _Jobs:
        try:
            # Where the first job is not submitted yet, it is empty.
            return _decoder.decode(self._file.read_bytes() or b"{}")
        except FileNotFoundError:
            return _Jobs()

    def _write(self, jobs: _Jobs) -> None:
        replace_file(self._file, msgspec.json.encode(jobs))

    def _remove(self) -> None:
        for spec in self._folder.glob(f"*/{SPEC}"):
            shutil.rmtree(spec.parent, ignore_errors=True)
        self._file.unlink(missing_ok=True)


class SlurmEngines:
    """Opens the engine ``slurm``; see `djinn_plugins.cluster.kinds.EngineFactory`."""

    name = "slurm"
    capabilities = ("moves",)
    """Its programs run on any node."""

    def open(self, folder: Path) -> Engine:
        """Open the engine for one cluster."""
        check_commands()
        return SlurmEngine(folder)


_decoder = msgspec.json.Decoder(_Jobs)
