"""Slurm's commands: submitting jobs, asking for their states, and ending them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import need_commands, run_command
from djinn_plugins.cluster.kinds import EngineProgram
from djinn_plugins.cluster.records import Records

__all__ = ("KEEPER", "JobState", "cancel", "check_commands", "states", "submit")

COMMANDS = ("sbatch", "squeue", "scancel")
KEEPER = "keeper"
"""The log of a job, beside that of its program."""
NOTICE_S = 60
"""How long before the end of its time a job is warned: longer than a server drains and ends."""
_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT"})
_WAITING = frozenset({
    "CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "STOPPED",
    "SUSPENDED"})
_ASKS_FOR_GPUS = ("SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK", "SBATCH_GRES")
_NODE = ("import sys; from djinn_plugins.postponing import postpone; postpone('djinn'); "
         "from djinn_plugins.cluster.slurm.node import main; main(sys.argv[1])")
"""The program of a job. It needs no PyTorch."""


@attrs.frozen
class JobState:
    """What Slurm says about a job.

    Attributes:
        name: The state, such as ``RUNNING``.
        reason: Why it waits.
        node: Where it runs.
    """

    name: str
    reason: str = ""
    node: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job is over, and is not put into the queue again."""
        return self.name in _ENDED

    @property
    def is_waiting(self) -> bool:
        """Whether the job has not begun, or does not continue at present."""
        return self.name in _WAITING


def check_commands() -> None:
    """Check that Slurm's commands exist.

    Raises:
        ConfigurationError: One of them is missing.
    """
    need_commands("slurm", COMMANDS, "Use a machine from which jobs can be submitted, such as a login node, and load "
                                     "Slurm's module there.")


def submit(name: str, program: EngineProgram, folder: Path) -> int:
    """Submit a job that keeps a program running.

    What else the job needs, such as a partition, an account or a time limit, sbatch reads from its own environment
    variables.

    Args:
        name: The job's name.
        program: The program, which is also in the folder.
        folder: Where its records are; its path is the same on all nodes.

    Returns:
        The job's number.

    Raises:
        ConfigurationError: Slurm refuses the job.
    """
    script = f"#!/bin/sh\nexec {shlex.join([sys.executable, '-c', _NODE, str(folder)])}\n"
    log = str(Records(folder).log_of(KEEPER)).replace("%", "%%")
    # The variables may be secrets, so they are in the environment, and not in a file or in a command line.
    environment = {**os.environ, **program.variables}
    for each in _ASKS_FOR_GPUS if not program.gpus else ():
        environment.pop(each, None)
    gpus = [f"--gres=gpu:{program.gpus}"] if program.gpus and not any(map(environment.get, _ASKS_FOR_GPUS)) else []
    said = run_command(
        ["sbatch", "--parsable", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--requeue", "--export=ALL",
         f"--signal=B:USR1@{NOTICE_S}", "--open-mode=append", f"--output={log}", f"--error={log}", *gpus],
        given=script, environment=environment,
        hint="Slurm takes the partition, account and time of jobs from SBATCH_PARTITION, SBATCH_ACCOUNT and "
             "SBATCH_TIMELIMIT.")
    number = re.match(r"\d+", said)
    if number is None:
        raise ConfigurationError(f"sbatch has answered {said[:200]!r}, which is no number of a job.")
    return int(number[0])


def states(jobs: Sequence[int]) -> dict[int, JobState]:
    """Ask for the states of jobs. Slurm forgets a job some minutes after its end.

    Raises:
        ConfigurationError: Slurm does not answer.
    """
    said = run_command(["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%T|%r|%B"])
    found = {}
    for line in said.splitlines():
        number, _, rest = line.strip().partition("|")
        if number.isdecimal() and int(number) in jobs:
            found[int(number)] = JobState(*rest.split("|")[:3])
    return found


def cancel(jobs: Sequence[int], *options: str) -> str:
    """Send a signal to jobs, or end them. For a job that has ended, nothing happens.

    Args:
        jobs: Their numbers.
        *options: Options of ``scancel``; without any, jobs and all their processes end.

    Returns:
        Why that was not possible; empty if it was.
    """
    try:
        if jobs:
            run_command(["scancel", *options, *map(str, jobs)])
    except ConfigurationError as error:
        return error.summary
    return ""
