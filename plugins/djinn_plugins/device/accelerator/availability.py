"""Whether the remote device reports itself as available, and so is the accelerator of this process.

PyTorch and libraries ask that to choose a device, and PyTorch also to pin memory of ordinary tensors. Importing djinn
must not change what a program does, so the answer is no until a run mode, as ``djinn run``, calls `make_available`.
"""

from __future__ import annotations

from contextlib import ExitStack

__all__ = ("is_available", "make_available")

_is_available = False


def is_available() -> bool:
    """Whether the remote device is the accelerator of this process."""
    return _is_available


def make_available() -> ExitStack:
    """Make the remote device the accelerator of this process: ``torch.accelerator`` then refers to it.

    Opens nothing and starts nothing; ``import djinn`` may come before or after.

    Returns:
        A context manager. Leaving it restores what was before; ignore it if the device is to stay available.
    """
    from djinn_plugins.device.accelerator.pinned_memory import pinned_factories

    before = _is_available
    undo = ExitStack()
    if not before:
        undo.enter_context(pinned_factories())
    undo.callback(_set, before)
    _set(True)
    return undo


def _set(value: bool) -> None:
    global _is_available
    _is_available = value
