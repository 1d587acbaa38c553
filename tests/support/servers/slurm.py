"""Slurm without Slurm: stand-ins for its commands, as ``PATH`` finds them, and the events that a test makes happen."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.servers import slurm_commands
from support.servers.slurm_commands import Job, jobs_of

__all__ = ("Slurm",)


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

    def warn(self, job: int) -> None:
        """Send the signal that the job has asked for, as before the end of its time."""
        found = self.jobs[job]
        name = found.get("signal").removeprefix("B:").partition("@")[0]
        os.kill(int(found.get("pid")), getattr(signal, f"SIG{name}"))
