"""What PyTorch asks of a device's backend: module, hooks, device guard."""

from __future__ import annotations

import collections
import ctypes
import itertools
import operator
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from djinn import devices, runtime
from djinn.tensor import pending_errors
from djinn_interceptor_device import autocast

_SEED_BYTES = 9
"""Length of a state that is a seed; no generator's state is that short. Seeds reach from -2**63 to 2**64 - 1."""


class BackendModule:
    """The module ``torch.remote_accelerator``.

    It calls itself unavailable: the answer decides whether ``torch.accelerator`` and pinned memory of *ordinary*
    tensors go to this device, and those are to stay as they were.
    """

    def is_available(self) -> bool:
        """Return False; see the class."""
        return False

    def is_initialized(self) -> bool:
        """Whether a session is running."""
        return runtime.is_initialized()

    @property
    def _initialized(self) -> bool:
        """Whether a session is running; checkpointing asks, and keeps the state of the random numbers only then."""
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
            RuntimeError: It is another.
        """
        index = device if isinstance(device, int) else torch.device(device).index
        if index not in (None, 0, -1):
            raise RuntimeError(f"The current remote accelerator is always the first; {device!r} cannot be. Name a "
                               "device where tensors are made instead.")

    def device(self, device: Any) -> Any:
        """Return a context in which ``device`` is current."""
        self.set_device(device)
        return torch.autograd.profiler.record_function("remote_accelerator.device")

    def manual_seed(self, seed: int) -> None:
        """Seed the remote random numbers."""
        runtime.seed_all(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the remote random numbers; ``torch.manual_seed`` calls this."""
        runtime.seed_all(int(seed))

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Fetch the state of the remote random numbers, ``u8[N]``.

        Before a session runs, the state is the seed that it will start with: ``torch.random.fork_rng`` asks every
        accelerator, also in programs that never use this one.
        """
        if runtime.is_initialized():
            return runtime.current().random_state(_device(device))
        return torch.tensor(list(runtime.next_seed().to_bytes(_SEED_BYTES, "little", signed=True)), dtype=torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Continue the remote random numbers from a state.

        Raises:
            RuntimeError, TypeError: It is none.
        """
        if getattr(new_state, "shape", None) == (_SEED_BYTES,):
            runtime.seed_all(int.from_bytes(bytes(new_state.tolist()), "little", signed=True))
            return
        session = runtime.current()
        if session.backend.welcome.device.startswith("cpu"):
            torch.Generator().set_state(new_state)  # says at once what is wrong with it
        session.set_random_state(new_state, _device(device))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Fetch the states of all devices."""
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the states of all devices."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """List the dtypes of autocast, which asks before it is first switched on."""
        autocast.register()
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything recorded has run."""
        runtime.current().synchronize()

    def empty_cache(self) -> None:
        """Do nothing: memory belongs to the executor."""


def _device(named: Any) -> torch.device:
    """Complete what names a device: an index, a device, its text, or nothing."""
    if named is None or (isinstance(named, int) and named < 0):
        return devices.checked_device(None)
    kind = devices.logical_device().type
    return devices.checked_device(torch.device(kind, named) if isinstance(named, int) else torch.device(named))


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """Without these, a backward pass fails."""

    def is_available(self) -> bool:
        """Return False, for the same reason as `BackendModule.is_available`."""
        return False

    def has_primary_context(self, device_index: int) -> bool:
        """Return True: autograd may run on this device."""
        return True

    def is_built(self) -> bool:
        """Return True."""
        return True


class DeviceGuard(torch._C._acc.DeviceGuard):
    """Without it, the first matrix product aborts the process; and with a careless one, errors in a backward pass do.

    Autograd's guards call `type_` from destructors that must not fail, also while a Python exception is on its way out
    of a hook or an operation. No callable can return a result while an exception is pending, so the destructor would
    fail and end the process. `type_` therefore takes the exception over first. It is raised again where the backward
    pass was called (`djinn_interceptor_device.functions.run_backward`). No line of Python may run before that: a
    debugger's or a coverage tool's trace function would be called for it, and fail. Nor may one run where nothing is
    pending, which is when an operation records a gradient: Ctrl-C would raise there.

    Source:
        torch/csrc/acc/Module.cpp (``PythonDeviceGuard``), Objects/call.c of CPython (``_Py_CheckFunctionResult``).
    """


_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_PLACES = 1024
"""More than calls of `type_` begin while another thread, or garbage being collected, interrupts one of them."""
_fetch = ctypes.pythonapi["PyErr_Fetch"]
_fetch.restype = None


def _object_at(address: ctypes.c_void_p) -> Any:
    return ctypes.py_object.from_buffer(address).value


class _Taken(dict[int | None, Any]):
    """What `type_` returns, by the address of the type of the exception that was fetched; no address, no exception.

    Args:
        place: Where the addresses of type, value and traceback were put.
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
    """Make a callable that fetches the exception, each time to another place, and looks there whether there was one.

    It runs in C unless there was: where Python runs, Ctrl-C may raise, and end the process. It takes the next of each
    of its columns before it does anything that could let another thread do so.
    """
    places = [(ctypes.c_void_p * 3)() for _ in range(_PLACES)]
    targets = [[ctypes.byref(place, offset * ctypes.sizeof(ctypes.c_void_p)) for place in places]
               for offset in range(3)]
    columns: list[list[Any]] = [[_Taken(place) for place in places], list(places), *targets]
    taken, filled, *addressed = map(itertools.cycle, columns)
    for column in (taken, filled, *addressed):
        # On its first round, it would ask a list for more, and take the pending exception for an answer.
        collections.deque(itertools.islice(column, _PLACES + 1), maxlen=0)
    # `_fetch` returns nothing, the truth of which is the position of the type's address.
    addresses = map(operator.getitem, filled, map(operator.truth, map(_fetch, *addressed)))
    return map(operator.getitem, taken, addresses).__next__


DeviceGuard.type_ = staticmethod(_fetching())  # type: ignore[method-assign, assignment]  # see the class
