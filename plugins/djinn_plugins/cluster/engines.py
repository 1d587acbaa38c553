"""What engines have in common."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.kinds import ProgramReport

__all__ = ("already_running", "changes", "claim", "need_commands", "run_command")

COMMAND_S = 60.0
"""How long a command may take."""


def changes(programs: Callable[[], list[ProgramReport]], every_s: float, longest_s: float = 0.0
            ) -> Iterator[list[ProgramReport]]:
    """Report states now, and after each change, until no program is left.

    See `djinn_plugins.cluster.kinds.Engine.watch`.

    Args:
        programs: Returns the present states.
        every_s: How long to wait between two looks at them.
        longest_s: How long to wait at most, if it is longer the longer nothing changes.
    """
    last: list[ProgramReport] | None = None
    pause_s = every_s
    while last != []:
        now = programs()
        if now != last:
            yield now
            last, pause_s = now, every_s
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(every_s, longest_s))


def already_running(name: str) -> ConfigurationError:
    """Return the error for a cluster that is to be started, and is running."""
    return ConfigurationError(f"The cluster {name} is running already.",
                              hint="Stop it with `djinn cluster down`, or choose another --name.")


def claim(file: Path, name: str) -> None:
    """Make the file that says that a cluster runs, which only this user can read.

    Raises:
        ConfigurationError: It exists.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise already_running(name) from None


def need_commands(engine: str, names: Sequence[str], hint: str) -> None:
    """Check that the commands of a system exist.

    Args:
        engine: The engine that needs them.
        names: The commands.
        hint: What to do without them.

    Raises:
        ConfigurationError: One of them is missing.
    """
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise ConfigurationError(f"The engine {engine} needs {', '.join(missing)}, which this machine does not have.",
                                 hint=hint)


def run_command(words: Sequence[str], *, given: str = "", environment: Mapping[str, str] | None = None,
                timeout_s: float = COMMAND_S, hint: str = "") -> str:
    """Run a command of the system that runs programs, and return what it prints.

    Args:
        words: Its command line.
        given: Its standard input.
        environment: Its variables; ``None`` for those of this process.
        timeout_s: How long it may take.
        hint: What to do if it fails.

    Raises:
        ConfigurationError: It cannot be used, or fails.
    """
    try:
        done = subprocess.run(words, input=given, env=environment, capture_output=True,  # noqa: S603  # an engine's
                              encoding="utf-8", errors="replace", timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{words[0]} cannot be used: {error}.") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-500:]
        raise ConfigurationError(f"{words[0]} fails: {said or f'status {done.returncode}'}", hint=hint)
    return done.stdout
