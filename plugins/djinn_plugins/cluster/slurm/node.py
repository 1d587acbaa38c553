"""What a job runs on its node: the process that keeps one program running."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec

from djinn_plugins.cluster.keeping import keep
from djinn_plugins.cluster.kinds import ClusterSpec
from djinn_plugins.cluster.records import Records

__all__ = ("SPEC", "main")

SPEC = "spec.json"
"""The file with the program, in the folder of its records."""


def main(folder: str) -> None:
    """Run a program until SIGTERM asks to stop.

    Before the job's time is over, Slurm sends SIGUSR1. Then the program ends in the same way, and the job is put into
    the queue again.

    Args:
        folder: Where the records of the program are.
    """
    records = Records(Path(folder))
    spec = _decoder.decode((records.folder / SPEC).read_bytes())
    is_expiring = False

    def expire(*_: object) -> None:
        nonlocal is_expiring
        is_expiring = True
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, expire)
    keep(records, spec, before=records.read())
    if is_expiring:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]],  # noqa: S603, S607  # this job's number
                       check=False)


_decoder = msgspec.json.Decoder(ClusterSpec)
