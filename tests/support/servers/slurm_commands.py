"""Stand-ins for Slurm's commands: a job is a process of this machine, with another one that attends to it.

usage: slurm_commands.py COMMAND FOLDER ARGUMENTS. They do what Slurm's manual pages say about the options that they
know, and refuse others. All that they share is in the folder: one folder for each job, and files that stand for events,
such as ``held`` (there are no resources) or, in a job's folder, ``node-failed``. Commands are started often, so that
most of them import little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TICK_S = 0.02
KILL_WAIT_S = 1.0
NODE = os.uname().nodename.partition(".")[0]
ENDED = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL"}
ENDS = ("node-failed", "cancelled", "requeued")
_SUBREAPER = 36


class Files:
    """What processes know about something: a folder, with a file for each fact."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, value: object) -> None:
        new = self.folder / f".{name}"
        new.write_text(str(value))
        new.rename(self.folder / name)

    def get(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text()
        return ""

    def takes(self, name: str) -> bool:
        """Whether something has happened, once."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).unlink()
            return True
        return False


class Job(Files):
    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def state(self) -> str:
        return self.get("state")


def options_of(command: str, arguments: list[str], known: str) -> tuple[dict[str, str], list[str]]:
    """Tell options, of the form ``--name=value``, from other arguments."""
    options, others = {}, []
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            others.append(argument)
        elif name in known.split():
            options[name] = value
        else:
            sys.exit(f"{command}: unrecognized option '{argument}'")
    return options, others


def jobs_of(folder: Path) -> dict[int, Job]:
    return {int(path.name): Job(path) for path in sorted(folder.glob("[0-9]*")) if (path / "state").exists()}


def sbatch(folder: Path, arguments: list[str]) -> None:
    options, others = options_of(
        "sbatch", arguments, "parsable job-name nodes ntasks requeue export signal open-mode output error gres")
    script = sys.stdin.read()
    if others or not script.startswith("#!"):
        sys.exit("sbatch: error: This does not look like a batch script.")
    numbers = [int(path.name) for path in folder.glob("[0-9]*")]
    limit = folder / "limit"
    if limit.exists() and len(numbers) >= int(limit.read_text()):
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    made = folder / str(max(numbers, default=0) + 1)
    made.mkdir()
    (made / "script").write_text(script)
    (made / "script").chmod(0o700)
    job = Job(made)
    for name, value in options.items():
        job.put(name, value)
    for name in ("SBATCH_PARTITION", "SBATCH_GRES"):
        job.put(name, os.environ.get(name, ""))
    job.put("state", "PENDING")
    print(job.number if "parsable" in options else f"Submitted batch job {job.number}", flush=True)
    if os.fork():
        return
    detach()
    while attend(job, folder):
        pass
    os._exit(0)


def attend(job: Job, folder: Path) -> bool:
    """Run a job once; return whether it is put into the queue again."""
    import subprocess

    job.put("state", "PENDING")
    while (folder / "held").exists():
        if job.takes("cancelled"):
            job.put("state", "CANCELLED")
            return False
        time.sleep(TICK_S)
    environment = os.environ | {"SLURM_JOB_ID": str(job.number), "SLURMD_NODENAME": NODE}
    if gpus := job.get("gres").removeprefix("gpu:"):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(gpus))))
    with Path(job.get("output").replace("%%", "%")).open("ab") as output:
        process = subprocess.Popen([str(job.folder / "script")], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   env=environment, start_new_session=True)
    job.put("pid", process.pid)
    job.put("state", "RUNNING")
    end = ""
    while process.poll() is None and not end:
        time.sleep(TICK_S)
        end = next(filter(job.takes, ENDS), "")
        suspend(job)
    if end in ("cancelled", "requeued"):
        deadline = time.monotonic() + KILL_WAIT_S
        kill(signal.SIGCONT)
        kill(signal.SIGTERM)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(TICK_S)
    job.put("state", "COMPLETING")
    kill(signal.SIGKILL)
    status = process.wait()
    reap()
    if end in ("requeued", "node-failed") or (not end and job.takes("requeued")):
        return True
    job.put("state", "CANCELLED" if end else "FAILED" if status else "COMPLETED")
    return False


def suspend(job: Job) -> None:
    """Suspend a running job, or resume it, as the file ``suspended`` says."""
    wanted = "SUSPENDED" if (job.folder / "suspended").exists() else "RUNNING"
    if job.state != wanted:
        kill(signal.SIGSTOP if wanted == "SUSPENDED" else signal.SIGCONT)
        job.put("state", wanted)


def detach() -> None:
    """Let this process outlive the command, and be the parent of what its children leave behind."""
    import ctypes

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Wait for all children."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def kill(number: int) -> None:
    """Send a signal to all descendants of this process."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return [*found, *(each for child in found for each in descendants(child))]


def squeue(folder: Path, arguments: list[str]) -> None:
    if (folder / "silent").exists():
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    options, others = options_of("squeue", arguments, "noheader states user format")
    if others or options["user"] != str(os.getuid()) or "noheader" not in options:
        sys.exit("squeue: error: Unrecognized option")
    for job in jobs_of(folder).values():
        state = job.state
        if options.get("states") == "all" or state not in ENDED:
            line = options["format"]
            reason, node = ("Resources", "n/a") if state == "PENDING" else ("None", NODE)
            for name, value in (("%A", job.number), ("%T", state), ("%r", reason), ("%B", node)):
                line = line.replace(name, str(value))
            print(line)


def scancel(folder: Path, arguments: list[str]) -> None:
    options, others = options_of("scancel", arguments, "signal batch")
    failed = False
    for number in map(int, others):
        job = jobs_of(folder).get(number)
        if "signal" not in options:
            if job is not None and job.state not in ENDED:
                job.put("cancelled", "")
        elif job is not None and job.state == "RUNNING" and "batch" in options:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job.get("pid")), getattr(signal, f"SIG{options['signal']}"))
        elif job is None or job.state != "COMPLETING":
            # Slurm tries it again for a minute and a half if the job is suspended.
            print(f"scancel: error: Kill job error on job id {number}: Job can not be altered now, try again later",
                  file=sys.stderr)
            (folder / "refused").touch()
            failed = True
    sys.exit(failed)


def scontrol(folder: Path, arguments: list[str]) -> None:
    action, number = arguments
    if action != "requeue":
        sys.exit(f"scontrol: invalid keyword: {action}")
    jobs_of(folder)[int(number)].put("requeued", "")


if __name__ == "__main__":
    {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[sys.argv[1]](
        Path(sys.argv[2]), sys.argv[3:])
