"""The alias: ``cuda`` is the remote device until it is closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from djinn.errors import ConfigurationError
from djinn.record import devices
from djinn_plugins.device.accelerator.availability import make_available
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda import (
    absent,
    compiling,
    kernels,
    legacy_types,
    one_device,
    precision,
    process_groups,
    profiling,
    runtime_functions,
    storages,
    tensors,
)

__all__ = ("cuda_alias",)

_SERVERS = ("DJINN_SERVER", "DJINN_SERVERS", "DJINN_CLUSTER")


@contextmanager
def cuda_alias() -> Iterator[None]:
    """Make ``cuda`` the remote device within the context, in all threads and in forked processes.

    Starts no session. One trace remains: PyTorch has noted that it asked for CUDA's initialization, so the first tensor
    that is made on ``cuda`` afterwards fails with another message.

    Raises:
        ConfigurationError: The device is to be one of this machine's CUDA devices.
    """
    with make_available(), Patches() as patches:
        if not _is_served():
            _use_cpu(patches)
        kernels.register(patches)
        tensors.replace(patches)
        storages.replace(patches)
        legacy_types.replace(patches)
        precision.replace(patches)
        compiling.replace(patches)
        one_device.replace(patches)
        process_groups.replace(patches)
        profiling.replace(patches)
        runtime_functions.replace(patches)
        absent.hide(patches)
        yield


def _is_served() -> bool:
    session = devices.running_session()
    return any(os.environ.get(name) for name in _SERVERS) or bool(session and session.backend.address)


def _use_cpu(patches: Patches) -> None:
    """Choose the executor of this process, which would otherwise find a CUDA device: the alias of itself."""
    if torch.cuda.is_available():
        raise ConfigurationError("This machine has CUDA devices, and no server is named.",
                                 hint="Name a server, or run the program without djinn.")
    patches.set_variable("DJINN_DEVICE", "cpu")
