"""Stores profiles between runs: one file per executor, in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import attrs
import msgspec
import torch

from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.files.cache_files import cache_folder, write_whole
from djinn_plugins.schedule.schedule import DeviceProfile, LinkProfile

if TYPE_CHECKING:
    from djinn.kinds import Connection, RemoteExecutor
    from djinn.session.session import Session

__all__ = ("Calibration", "Identity", "calibration_of", "folder", "identity_of", "load", "path_of", "save",
           "use_calibration")

FORM = 1
"""Format of the files; files in another format are ignored."""
MAX_FILE_BYTES = 4 << 20
log = logging.getLogger("djinn_plugins.schedule.calibrate")


@attrs.frozen
class Identity:
    """Identifies the executor that a profile belongs to, as far as the client knows it."""

    host: str
    """Host of its address, without the port, which changes; a description of this machine for an executor in this
    process.
    """
    device: str
    torch: str
    threads: int = 0
    """Number of CPU threads for computing, in this process; 0 for other processes, where it is not known."""

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
        return f"{self.device} of {self.host}, PyTorch {self.torch}{threads}"


@attrs.frozen
class Calibration:
    """The speed of an executor and of the connection to it."""

    of: Identity
    profile: DeviceProfile = attrs.field(factory=DeviceProfile)
    home_link: LinkProfile = attrs.field(factory=LinkProfile)
    """From the executor to the client."""
    feed_link: LinkProfile = attrs.field(factory=LinkProfile)
    """From the client to the executor."""
    seconds: float = 0.0
    """How long the measurement took."""
    skipped: tuple[str, ...] = ()
    """Workloads that it could not run, with the exceptions that they raised."""

    @property
    def is_measured(self) -> bool:
        """Whether it was measured; otherwise it contains defaults."""
        return self.profile.is_measured

    def __str__(self) -> str:
        """Describe it in a few lines."""
        profile = self.profile
        rates = {str(pattern): rate for pattern, rate in profile.rates.items()} or {"any": profile.rate}
        how = "measured" if self.is_measured else "defaults, not measured; see djinn.calibrate()"
        times = {"launch": profile.launch_s, "view": profile.view_s, "run": profile.run_s}
        lines = [f"{self.of}: {how}",
                 "  " + ", ".join(f"{name} {time_s * 1e6:.1f} us" for name, time_s in times.items())]
        lines += [f"  {pattern}: {rate.flops_per_s / 1e9:.1f} GFLOP/s, {rate.bytes_per_s / 1e9:.1f} GB/s"
                  for pattern, rate in sorted(rates.items())]
        up, down = self.feed_link, self.home_link
        lines.append(f"  round trip {(up.latency_s + down.latency_s) * 1e6:.0f} us, "
                     f"up {up.bytes_per_s / 1e9:.2f} GB/s, down {down.bytes_per_s / 1e9:.2f} GB/s")
        if profile.operations:
            lines.append(f"  {len(profile.operations)} operations by themselves")
        lines += [f"  left out: {skipped}" for skipped in self.skipped]
        return "\n".join(lines)


@attrs.frozen
class _File:
    form: int
    calibration: Calibration


_used: WeakKeyDictionary[Session, dict[Identity, Calibration]] = WeakKeyDictionary()
"""What sessions have measured, or loaded."""


def calibration_of(session: Session, executor: int = 0) -> Calibration:
    """Return how fast an executor of a session is thought to be; see `djinn.calibrate`."""
    known = _used.setdefault(session, {})
    identity = identity_of(session.backend.executors[executor])
    if identity not in known:
        known[identity] = load(identity)
    return known[identity]


def use_calibration(session: Session, calibration: Calibration) -> None:
    """Let a session use a new calibration."""
    _used.setdefault(session, {})[calibration.of] = calibration


def identity_of(executor: RemoteExecutor | Connection) -> Identity:
    """Tell which executor a connection leads to, as far as its client knows."""
    welcome = executor.welcome
    parts = urlsplit(executor.address)
    if parts.scheme == "local":
        here = "-".join(filter(None, (platform.node(), platform.machine())))
        threads = torch.get_num_threads() if device_of(welcome).kind == "cpu" else 0
        return Identity(here, welcome.device, str(welcome.torch), threads)
    return Identity(parts.hostname or executor.address, welcome.device, str(welcome.torch))


def folder() -> Path:
    """Return the folder of the profiles."""
    return cache_folder() / "profiles"


def path_of(identity: Identity) -> Path:
    """Return the file of an executor."""
    digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()
    return folder() / f"{digest[:24]}.json"


def save(calibration: Calibration) -> Path:
    """Save a calibration atomically.

    Raises:
        OSError: It cannot be written.
    """
    path = path_of(calibration.of)
    write_whole(path, msgspec.json.format(msgspec.json.encode(_File(FORM, calibration)), indent=1))
    return path


def load(identity: Identity) -> Calibration:
    """Load the calibration of an executor; defaults if there is none. An invalid file is ignored."""
    path = path_of(identity)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return Calibration(identity)
    except OSError as error:
        log.warning("%s cannot be read (%s); defaults are used", path, error)
        return Calibration(identity)
    try:
        found = _decoder.decode(content)
        _check(found, identity)
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("%s is no profile of %s (%s); defaults are used until djinn.calibrate() has written it anew",
                    path, identity, error)
        return Calibration(identity)
    return found.calibration


def _check(found: _File, identity: Identity) -> None:
    """Check conditions that types do not express.

    Raises:
        ValueError: The format or the executor is different, or a number is invalid.
    """
    if found.form != FORM:
        raise ValueError(f"it is of form {found.form}, not {FORM}")
    calibration = found.calibration
    if calibration.of != identity:
        raise ValueError(f"it is of {calibration.of}")
    profile = calibration.profile
    divisors = [number for rate in (profile.rate, *profile.rates.values()) for number in attrs.astuple(rate)]
    divisors += [calibration.home_link.bytes_per_s, calibration.feed_link.bytes_per_s]
    times: list[Any] = [profile.launch_s, profile.view_s, profile.run_s, calibration.home_link.latency_s,
                        calibration.feed_link.latency_s]
    for operation in profile.operations.values():
        times.append(operation.launch_s)
        times += [number for sample in operation.samples for number in attrs.astuple(sample)]
    if not all(math.isfinite(number) and number > 0 for number in divisors):
        raise ValueError("a rate is not above zero")
    if not all(math.isfinite(number) and number >= 0 for number in times):
        raise ValueError("a time is below zero")


_decoder = msgspec.json.Decoder(_File)
