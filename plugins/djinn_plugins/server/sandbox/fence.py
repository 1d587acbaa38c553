"""Sets up a worker's sandbox, and examines which parts of it this system supports."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from djinn.errors import ConfigurationError
from djinn_plugins.server.certificates import why_none
from djinn_plugins.server.options import SandboxMode
from djinn_plugins.server.sandbox import landlock, privileges, seccomp
from djinn_plugins.server.sandbox.landlock import Files
from djinn_plugins.server.sandbox.paths import beneath, files_for, unreadable_for_others

__all__ = ("Fence", "SandboxPart", "examine", "plan")

_log = logging.getLogger("djinn.server")
TRIAL_TIMEOUT_S = 60.0
"""How long a driver may take to show that it works inside the sandbox."""
_HINT = "`djinn doctor` says what this system has; --sandbox auto does without the rest."


@attrs.frozen
class SandboxPart:
    """One part of the sandbox.

    Attributes:
        name: The rights that it restricts.
        missing: Why it is not available here; empty if it is.
        consequence: What a compromised worker can do without it.
        is_needed: Whether ``--sandbox require`` requires it here.
    """

    name: str
    missing: str
    consequence: str
    is_needed: bool = True


def has_driver(device: str) -> bool:
    """Whether a device has a driver that runs in the worker's process."""
    return device.partition(":")[0] not in ("cpu", "meta")


def examine(secrets: Sequence[str] = (), *, encrypts: bool = True) -> list[SandboxPart]:
    """Examine what this system supports, without using it.

    Args:
        secrets: Files that no worker may read.
        encrypts: Whether connections are to be encrypted.
    """
    files_missing = landlock.why_not() or _exposed(secrets)
    return [
        SandboxPart("system calls", seccomp.why_not(),
                    "start programs, connect to whatever the server can reach, and look into processes of its user"),
        SandboxPart("files", files_missing,
                    "read what its user can read" if landlock.why_not() else f"read {files_missing}"),
        SandboxPart("users", _why_no_user(),
                    "act as the server's user, as far as the other parts let it", is_needed=os.name == "posix"
                    and os.geteuid() == 0),
        *([SandboxPart("keys", why_none(), "pass itself off as the server, whose key it knows")] if encrypts else []),
    ]


def plan(mode: SandboxMode, secrets: Sequence[str], *, encrypts: bool) -> None:
    """Log which parts of the sandbox a server's workers will have.

    Args:
        mode: The operator's choice.
        secrets: Files that no worker may read.
        encrypts: Whether connections are encrypted.

    Raises:
        ConfigurationError: The mode is ``require``, and a part is missing.
    """
    if mode is SandboxMode.off:
        _log.warning("no sandbox (--sandbox off): a worker that is taken over can do what the server's user can")
        return
    parts = [part for part in examine(secrets, encrypts=encrypts) if part.missing]
    needed = [part for part in parts if part.is_needed]
    if needed and mode is SandboxMode.require:
        raise ConfigurationError(
            "--sandbox require: " + "; ".join(f"{part.name}: {part.missing}" for part in needed) + ".", hint=_HINT)
    for part in parts:
        (_log.warning if part.is_needed else _log.info)(  # no bug
            "sandbox without %s: %s. A worker that is taken over can %s", part.name, part.missing, part.consequence)


class Fence:
    """Sets up the sandbox of this process, in two steps: steps that need a privilege come before it is given up.

    Args:
        mode: The operator's choice.
        device: The device that the process uses.

    Concurrency:
        Called by the only thread of the process, because the rights of other threads would not change.
    """

    def __init__(self, mode: SandboxMode, device: str) -> None:
        self._mode = mode
        self._has_driver = has_driver(device)

    def enter(self, trial: Callable[[], object]) -> None:
        """Give up rights that are no longer needed: those of other users, and access to files, signals and ports.

        Device drivers open arbitrary files, and differ from each other. So under ``auto``, a forked process first tries
        whether this device's driver works inside the sandbox.

        Args:
            trial: Uses the device for the first time.

        Raises:
            ConfigurationError: The rights cannot be given up, and the mode requires it.
        """
        if self._mode is SandboxMode.off:
            return
        tasks = Path("/proc/self/task")
        threads = len(list(tasks.iterdir())) if tasks.exists() else 1
        files = files_for(has_driver=self._has_driver)
        ruleset = None
        with self._part("files"):
            if threads != 1:
                raise OSError(f"{threads} threads run already, and it would bind one of them")
            if self._has_driver and self._mode is SandboxMode.auto and not _works_behind(files, trial):
                raise OSError("the device's driver does not work behind it; a worker that is taken over can read what "
                              "its user can read")
            ruleset = landlock.Ruleset(files)
        with self._part("limits"):
            privileges.limit(has_driver=self._has_driver)
        with self._part("users"):
            self._become(files.readable, is_fenced=ruleset is not None)
        with self._part("privileges"):
            privileges.hide()
            privileges.forbid_gaining()
        if ruleset is not None:
            with self._part("files"):
                ruleset.restrict()

    def seal(self) -> None:
        """Restrict the process to the system calls that serving needs.

        Raises:
            ConfigurationError: As for `enter`.
        """
        if self._mode is not SandboxMode.off:
            with self._part("system calls"):
                seccomp.install(has_driver=self._has_driver)

    def _become(self, readable: Sequence[str], *, is_fenced: bool) -> None:
        if privileges.why_no_user():
            privileges.become_nobody_else(None)
            return
        closed = _closed(readable)
        unusable = privileges.closed_device() if self._has_driver else ""
        if unusable or (closed and not is_fenced):
            privileges.become_nobody_else(None)
            # With the right to read all files, and without Landlock, it could read more than before.
            raise OSError(f"other users than this one cannot use {unusable or closed}, which PyTorch needs")
        privileges.become_nobody_else(privileges.user_for(os.getpid()), reads_anywhere=bool(closed))

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._mode is SandboxMode.require:
                raise ConfigurationError(f"--sandbox require: {name}: {error}.", hint=_HINT) from None
            _log.warning("sandbox without %s: %s", name, error)


def _works_behind(files: Files, trial: Callable[[], object]) -> bool:
    """Try it in a forked process, which then exits; the rules are made anew there, since `/proc/self` is different.

    Concurrency:
        Called by the only thread of the process.
    """
    child = os.fork()
    if child:
        return _succeeded(child)
    status = 1
    try:
        privileges.forbid_gaining()
        landlock.Ruleset(files).restrict()
        trial()
        status = 0
    except Exception as error:  # noqa: BLE001  # logged; the exit status also shows it
        _log.info("the device does not work behind a fence of files: %s: %s", type(error).__name__, error)
    finally:
        os._exit(status)


def _succeeded(child: int) -> bool:
    """Wait for a process; one that hangs in its driver is killed."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], TRIAL_TIMEOUT_S)[0]:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(handle)
    return status == 0


def _why_no_user() -> str:
    """Return the reason why workers will not have their own users here; empty if they will."""
    why = privileges.why_no_user()
    closed = "" if why or not landlock.why_not() else _closed(files_for(has_driver=False).readable)
    return why or (f"without Landlock, they could not read {closed}" if closed else "")


def _closed(readable: Sequence[str]) -> str:
    """Return a file that PyTorch needs and other users cannot read; empty if they can read all of them."""
    modules = [module.__file__ for name in ("os", "torch", "djinn", "djinn_plugins.server")
               if (module := sys.modules.get(name)) is not None and module.__file__]
    # A process may read about itself, whatever the modes of these files say.
    others = (path for path in readable if not path.startswith("/proc/self/"))
    return unreadable_for_others((*others, *modules))


def _exposed(secrets: Sequence[str]) -> str:
    """Describe a secret file in a folder that workers read modules from; empty if workers cannot read any."""
    readable = files_for(has_driver=False)
    if not privileges.why_no_user() and not _closed(readable.readable):
        secrets = [path for path in secrets if path and not unreadable_for_others([path])]
    for path in filter(None, secrets):
        if folder := beneath(path, readable):
            return f"{path}, which lies in {folder}, where modules are read from"
    return ""
