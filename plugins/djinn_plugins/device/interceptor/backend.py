"""The interfaces that PyTorch requires of a device's backend: module, hooks, device guard."""

from __future__ import annotations

import collections
import ctypes
import itertools
import operator
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from threading import get_ident
from types import ModuleType
from typing import Any

import torch

from djinn.record import devices
from djinn.record.dispatcher import pending_errors
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.common.device_report import device_of
from djinn_plugins.device.accelerator import availability
from djinn_plugins.device.interceptor import autocast
from djinn_plugins.device.interceptor.device_memory import MemoryFunctions, device_named
from djinn_plugins.device.interceptor.streams import StreamFunctions

_SEED_BYTES = 9
"""Length of a state that is a seed; no generator's state is that short. Seeds range from -2**63 to 2**64 - 1."""


class BackendModule(MemoryFunctions, StreamFunctions):
    """The module ``torch.remote_accelerator``.

    It reports itself as unavailable unless it is the process's accelerator: PyTorch uses this answer to decide whether
    ``torch.accelerator`` and pinned memory of *ordinary* tensors use this device.
    """

    def is_available(self) -> bool:
        """Whether this device is the process's accelerator; see the class."""
        return availability.is_available()

    def is_initialized(self) -> bool:
        """Whether a session is running."""
        return runtime.is_initialized()

    @property
    def _initialized(self) -> bool:
        """Whether a session is running; checkpointing saves the random state only if it is."""
        return runtime.is_initialized()

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of logical devices."""
        return devices.device_count()

    def current_device(self) -> int:
        """Return the index of the current logical device."""
        return 0

    def set_device(self, device: Any) -> None:
        """Accept the first device, which is always the current one.

        Raises:
            RuntimeError: It is another device.
        """
        if device_named(device).index:
            raise RuntimeError(f"The current remote accelerator is always the first; {device!r} cannot be. Name a "
                               "device where tensors are made instead.")

    def device(self, device: Any) -> Any:
        """Return a context in which ``device`` is current."""
        if device is not None:
            self.set_device(device)
        return nullcontext()

    def device_of(self, obj: Any) -> Any:
        """Return a context in which the device of a tensor is current; others change nothing."""
        return self.device(obj.device if isinstance(obj, LazyTensor) else None)

    def init(self) -> None:
        """Start a session unless one is running."""
        runtime.ensure_initialized()

    def initial_seed(self) -> int:
        """Return the seed of the remote random numbers."""
        return runtime.next_seed()

    def seed(self) -> None:
        """Seed the remote random numbers with an unpredictable number."""
        runtime.seed_all(int.from_bytes(os.urandom(8), "little") >> 1)

    seed_all = seed

    def manual_seed(self, seed: int) -> None:
        """Seed the remote random numbers."""
        runtime.seed_all(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the remote random numbers; ``torch.manual_seed`` calls this."""
        runtime.seed_all(int(seed))

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Fetch the state of the remote random numbers, ``u8[N]``.

        Before a session runs, the state is the seed that it will start with: ``torch.random.fork_rng`` asks every
        accelerator, even in programs that never use this one.
        """
        if runtime.is_initialized():
            return runtime.current().random_state(device_named(device))
        return torch.tensor(list(runtime.next_seed().to_bytes(_SEED_BYTES, "little", signed=True)), dtype=torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Continue the remote random numbers from a state.

        Raises:
            RuntimeError, TypeError: It is not a state.
        """
        if getattr(new_state, "shape", None) == (_SEED_BYTES,):
            runtime.seed_all(int.from_bytes(bytes(new_state.tolist()), "little", signed=True))
            return
        session = runtime.current()
        if device_of(session.backend.welcome).kind == "cpu":
            torch.Generator().set_state(new_state)  # reports an invalid state at once
        session.set_random_state(new_state, device_named(device))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Fetch the states of all devices."""
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the states of all devices."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """List the dtypes of autocast, which calls this when it is first enabled."""
        autocast.register()
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything recorded has run. Without a session, there is nothing to wait for."""
        device_named(device)
        if runtime.is_initialized():
            runtime.current().synchronize()

    @property
    def amp(self) -> ModuleType:
        """Autocast and gradient scaling for this device."""
        return amp_module(devices.logical_device().type)

    OutOfMemoryError = torch.OutOfMemoryError


@cache
def amp_module(kind: str) -> ModuleType:
    """Make the module ``amp`` of the device's module."""
    made = ModuleType(f"torch.{kind}.amp")
    made.autocast = partial(torch.autocast, kind)  # type: ignore[attr-defined]  # of the module
    made.GradScaler = partial(torch.amp.GradScaler, kind)  # type: ignore[attr-defined]  # as above
    made.custom_fwd = partial(torch.amp.custom_fwd, device_type=kind)  # type: ignore[attr-defined]  # as above
    made.custom_bwd = partial(torch.amp.custom_bwd, device_type=kind)  # type: ignore[attr-defined]  # as above
    return made


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """Hooks that a backward pass requires."""

    def is_available(self) -> bool:
        """As `BackendModule.is_available`."""
        return availability.is_available()

    def has_primary_context(self, device_index: int) -> bool:
        """Return True: autograd may run on this device."""
        return True

    def is_built(self) -> bool:
        """Return True."""
        return True


class DeviceGuard(torch._C._acc.DeviceGuard):
    """Without it, the first matrix product aborts the process; a careless one lets errors in a backward pass abort it.

    Autograd's guards call `type_` from destructors that must not fail, even while a Python exception propagates from a
    hook or an operation. No callable can return a result while an exception is pending, so the destructor would fail
    and abort the process. Therefore `type_` first takes the exception, and it is raised again at the call of the
    backward pass (`djinn_plugins.device.interceptor.gradients.adapt_backward_passes`). No line of Python may run before
    that: a debugger's or a coverage tool's trace function would be called for it, and fail. No line may run without a
    pending exception, either, because that happens when an operation records a gradient: Ctrl-C would raise there.

    Source:
        torch/csrc/acc/Module.cpp (``PythonDeviceGuard``), Objects/call.c of CPython (``_Py_CheckFunctionResult``).
    """


_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_PLACES = 1024
"""More than the number of calls of `type_` that can start while one of them is interrupted by a thread or the GC."""
_fetch = ctypes.pythonapi["PyErr_Fetch"]
_fetch.restype = None


def _object_at(address: ctypes.c_void_p) -> Any:
    return ctypes.py_object.from_buffer(address).value


class _Taken(dict[int | None, Any]):
    """The return values of `type_`, by the address of the fetched exception's type; no address means no exception.

    Args:
        place: Where the addresses of type, value and traceback are stored.
    """

    def __init__(self, place: Any) -> None:
        super().__init__({None: _TYPE})
        self._place = place

    def __missing__(self, address: int | None) -> Any:
        """Keep the exception."""
        kind, value, traceback = (ctypes.c_void_p(address) for address in self._place)
        ctypes.pythonapi.PyErr_NormalizeException(*map(ctypes.byref, (kind, value, traceback)))
        error: BaseException = _object_at(value)
        pending_errors[get_ident()] = error.with_traceback(_object_at(traceback) if traceback.value else None)
        for item in (kind, value, traceback):
            ctypes.pythonapi.Py_DecRef(item)
        return _TYPE


def _fetching() -> Callable[[], Any]:
    """Create a callable that fetches the exception, each time to another place, and checks whether there was one.

    Without an exception, it runs entirely in C: Python code could raise a `KeyboardInterrupt` and abort the process. It
    takes the next element of each column before any step that could switch threads.
    """
    places = [(ctypes.c_void_p * 3)() for _ in range(_PLACES)]
    targets = [[ctypes.byref(place, offset * ctypes.sizeof(ctypes.c_void_p)) for place in places]
               for offset in range(3)]
    columns: list[list[Any]] = [[_Taken(place) for place in places], list(places), *targets]
    taken, filled, *addressed = map(itertools.cycle, columns)
    for column in (taken, filled, *addressed):
        # Otherwise the first round would extend a list, and mistake the pending exception for the result.
        collections.deque(itertools.islice(column, _PLACES + 1), maxlen=0)
    # `_fetch` returns `None`, whose truth value is the index of the type's address.
    addresses = map(operator.getitem, filled, map(operator.truth, map(_fetch, *addressed)))
    return map(operator.getitem, taken, addresses).__next__


DeviceGuard.type_ = staticmethod(_fetching())  # type: ignore[method-assign, assignment]  # see the class
