"""Everything that a machine with a GPU can tell about djinn in ten minutes, the most important first.

Usage: python tests/gpu/first_run.py [FOLDER] in the project's root. Each step is a process of its own with its own
limit, because a kernel that fails ends a process's use of CUDA. The folder gets a log for each step.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

LIMIT_S = 570.0
"""For everything together."""
LEAST_S = 5.0
"""A step that would have less time is left out."""
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
_MEASURE = (sys.executable, "tests/gpu/measure.py")
# Random programs draw indices, too; on a GPU, one that is out of range ends the process's use of it. So they come last.
_RANDOM = "runs_are_what_they_are or replay_stable"


@attrs.frozen
class Step:
    """A command, and how many seconds it may take."""

    name: str
    limit_s: float
    command: Sequence[str]


STEPS = (
    Step("what is installed", 60, (sys.executable, "-c", "from djinn_plugins.start import main; main()", "doctor")),
    Step("operators equal local PyTorch", 60, (*_PYTEST, "tests/gpu/test_kernels.py")),
    Step("a server's results, losses and memory", 150, (*_PYTEST, "tests/gpu/test_served.py")),
    Step("the executor", 90, (*_PYTEST, "tests/executor/test_cuda.py", "-k", f"not ({_RANDOM})")),
    Step("launches, graphs and copies", 40, (*_MEASURE, "device")),
    Step("decoding GPT-2", 90, (*_MEASURE, "decode", "cuda:0", "gpt2")),
    Step("decoding a Llama of 1.1B", 120, (*_MEASURE, "decode", "cuda:0", "llama")),
    Step("laws of the executor", 90, (*_PYTEST, "--pyargs", "djinn_conformance", "--djinn-plugin=djinn-executor-cuda",
                                      "-k", f"not ({_RANDOM})")),
    Step("random programs", 60, (*_PYTEST, "tests/executor/test_cuda.py", "-k", _RANDOM)),
)


def outcome_of(step: Step, log: Path, left_s: float) -> str:
    """Run a step, and say how it ended; its output is in the log."""
    limit_s = min(step.limit_s, left_s)
    if limit_s < LEAST_S:
        return "no time was left"
    begun = time.monotonic()
    with log.open("w") as output:
        try:
            status = subprocess.run(step.command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s,
                                    check=False).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
    last = (log.read_text().strip().splitlines() or [""])[-1]
    return f"{'well' if status == 0 else f'status {status}'} after {time.monotonic() - begun:.0f} s: {last}"


def run(steps: Sequence[Step], folder: Path, limit_s: float = LIMIT_S) -> dict[str, str]:
    """Run steps until the time is over, and return how each ended."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), dict[str, str]()
    for number, step in enumerate(steps):
        found[step.name] = outcome_of(step, folder / f"{number}.log", limit_s - (time.monotonic() - begun))
        print(f"{step.name}: {found[step.name]}", flush=True)
    return found


if __name__ == "__main__":
    run(STEPS, Path(sys.argv[1] if len(sys.argv) > 1 else "gpu-logs"))
