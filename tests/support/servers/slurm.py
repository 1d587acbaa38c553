"""Slurm in tests: stand-ins for its commands, as ``PATH`` finds them, or Slurm itself, and what a test makes happen."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.servers import slurm_commands
from support.servers.slurm_commands import ENDED, Job, jobs_of

__all__ = ("SYSTEMS", "RealSlurm", "Slurm", "slurm_of")

SYSTEMS = ("stand-in", "real")
_REAL = "DJINN_TEST_SLURM"


class Slurm:
    """A folder with the commands, and a queue.

    Args:
        folder: Where they are.

    Attributes:
        path: The value of ``PATH`` with which they are found.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "queue"
        self.folder.mkdir(parents=True)
        commands = folder / "bin"
        commands.mkdir()
        for name in ("sbatch", "squeue", "scancel", "scontrol"):
            words = [sys.executable, "-S", "-E", slurm_commands.__file__, name, str(self.folder)]
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (commands / name).chmod(0o755)
        self.path = f"{commands}{os.pathsep}{os.environ['PATH']}"

    @property
    def jobs(self) -> dict[int, Job]:
        """The jobs that it knows, by number."""
        return jobs_of(self.folder)

    def states(self) -> list[str]:
        """The states of all jobs."""
        return [job.state for job in self.jobs.values()]

    @contextmanager
    def during(self, event: str) -> Iterator[None]:
        """While jobs wait for resources (``held``), or while the controller does not answer (``silent``)."""
        (self.folder / event).touch()
        try:
            yield
        finally:
            (self.folder / event).unlink()

    def limit(self, jobs: int) -> None:
        """Refuse further jobs."""
        (self.folder / "limit").write_text(str(jobs))

    def fail_node(self, job: int) -> None:
        """End all processes of a job; it was submitted with ``--requeue``."""
        self.jobs[job].put("node-failed", "")

    @property
    def has_refused(self) -> bool:
        """Whether a signal was asked for that a job cannot be sent."""
        return (self.folder / "refused").exists()

    def names(self) -> list[str]:
        """The names of all jobs."""
        return [job.get("job-name") for job in self.jobs.values()]

    def warn(self, job: int) -> None:
        """Send the signal that the job has asked for, as before the end of its time."""
        found = self.jobs[job]
        name = found.get("signal").removeprefix("B:").partition("@")[0]
        os.kill(int(found.get("pid")), getattr(signal, f"SIG{name}"))

    @contextmanager
    def suspended(self, job: int) -> Iterator[None]:
        """While a job is suspended."""
        (self.jobs[job].folder / "suspended").touch()
        try:
            yield
        finally:
            self.jobs[job].takes("suspended")


class RealSlurm:
    """A Slurm of one node, this machine, whose operator this user is; what it does not do takes minutes or breaks it.

    Only jobs that are submitted later are seen.
    """

    path = os.environ["PATH"]
    has_refused = False

    def __init__(self) -> None:
        self._before = set(self._asked("%A"))

    @staticmethod
    def _asked(form: str) -> dict[int, str]:
        lines = _said("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format=%A|{form}")
        return {int(number): rest for number, _, rest in sorted(line.partition("|") for line in lines.splitlines())}

    @property
    def jobs(self) -> dict[int, str]:
        """The states of jobs, by number."""
        return {number: state for number, state in self._asked("%T").items() if number not in self._before}

    def states(self) -> list[str]:
        """The states of all jobs."""
        return list(self.jobs.values())

    def names(self) -> list[str]:
        """The names of all jobs."""
        return [name for number, name in self._asked("%j").items() if number not in self._before]

    def fail_node(self, job: int) -> None:
        """Put a job into the queue again, as when its node fails."""
        _said("scontrol", "requeue", str(job))

    def warn(self, job: int) -> None:
        """Send the signal that Slurm sends before the end of the job's time."""
        _said("scancel", "--signal=USR1", "--batch", str(job))

    @contextmanager
    def suspended(self, job: int) -> Iterator[None]:
        """While a job is suspended."""
        _said("scontrol", "suspend", str(job))
        try:
            yield
        finally:
            if self.jobs[job] not in ENDED:
                _said("scontrol", "resume", str(job))


def _said(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def slurm_of(system: str, folder: Path) -> Slurm | RealSlurm:
    """Return one of the systems; Slurm itself only where a variable says so."""
    if system == "stand-in":
        return Slurm(folder)
    if not os.environ.get(_REAL):
        pytest.skip(f"needs Slurm on this machine: set {_REAL}=1")
    return RealSlurm()
