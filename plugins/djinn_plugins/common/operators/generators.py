"""``torch.Generator(device="remote_accelerator")``: a stream of random numbers whose state the executor holds.

A draw exchanges the session's state for the generator's, and exchanges them back. Both are operations of the program,
so a draw needs no answer.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch

from djinn.record import devices
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.operators.random_exchange import exchange_random_state
from djinn_plugins.common.operators.random_states import checked_state

__all__ = ("RemoteGenerator", "remote_generator")

_T = TypeVar("_T")
_CUDA_STATE = struct.Struct("<QQ")
"""Seed, and how many numbers were drawn."""
_known: weakref.WeakValueDictionary[int, RemoteGenerator] = weakref.WeakValueDictionary()
"""By the address of PyTorch's own object, because PyTorch hands each call another Python object of its own class."""


class RemoteGenerator(torch.Generator):
    """A generator of the remote device.

    Its own state as a CPU generator is that of its seed. It serves as the state before the first draw on an executor of
    that kind, and checks seeds and states.

    Concurrency:
        As the session's own random numbers: threads that draw at the same time share the stream in any order.
    """

    _device: torch.device
    _held: Any
    """The state that the executor holds, a lazy tensor; ``None`` before the first draw from `_given` or the seed."""
    _given: torch.Tensor | None
    """The state that was set."""

    def __new__(cls, device: Any = None) -> Self:
        """Create a generator with PyTorch's default seed."""
        made: Any = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]  # the stub has `__init__` only
        made._device = devices.checked_device(None if device is None else torch.device(device))
        made._held = made._given = None
        _known[made._cdata] = made
        return made  # type: ignore[no-any-return]  # as above

    def __init__(self, device: Any = None) -> None:
        # PyTorch's own would be given the device.
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute there
        """Logical device."""
        return self._device

    def draw(self, session: Any, run: Callable[[], _T]) -> _T:
        """Run an operation that draws from this generator in place of the session's."""
        exchange = exchange_random_state()
        with session.lock:
            own = exchange(self._state(session))
            try:
                return run()
            finally:
                self._held = exchange(own)

    def _state(self, session: Any) -> Any:
        if self._held is not None:
            session.check_owner(self._held)
        else:
            self._held = session.upload(self._first(session) if self._given is None else self._given, self._device)
        return self._held

    def _first(self, session: Any) -> torch.Tensor:
        """Return the state that a generator of the executor's kind has after it was seeded."""
        kind = device_of(session.backend.welcome).kind
        if kind == "cpu":
            return super().get_state()
        if kind == "cuda":
            return _bytes(_CUDA_STATE.pack(super().initial_seed() % 2**64, 0))
        with session.lock:
            own = session.random_state(self._device)
            session.seed(super().initial_seed())
            state: torch.Tensor = session.random_state(self._device)
            session.set_random_state(own, self._device)
        return state

    def manual_seed(self, seed: int) -> Self:
        """Restart from a seed."""
        super().manual_seed(seed)
        self._held = self._given = None
        return self

    def seed(self) -> int:
        """Restart from an unpredictable seed, and return it."""
        chosen = super().seed()
        self._held = self._given = None
        return chosen

    def get_state(self) -> torch.Tensor:
        """Fetch the state, ``u8[N]``, whose format the executor's kind of device defines."""
        if self._held is not None:
            state: torch.Tensor = self._held.cpu()
            return state
        return self._first(devices.current_session()) if self._given is None else self._given.clone()

    def set_state(self, state: torch.Tensor) -> Self:
        """Continue from a state that `get_state` returned.

        Raises:
            RuntimeError, TypeError: It is no state.
        """
        if state.device.type == "cpu" and state.dtype == torch.uint8 and state.numel() == _CUDA_STATE.size:
            super().manual_seed(_CUDA_STATE.unpack(bytes(state.tolist()))[0])
        else:
            super().set_state(checked_state("cpu", state))
        self._held, self._given = None, state.clone()
        return self

    def clone_state(self) -> Self:
        """Return a generator that continues from here on its own."""
        made = type(self)(self._device).manual_seed(self.initial_seed())
        made._given = self._given
        made._held = None if self._held is None else self._held.clone()
        return made

    def __reduce__(self) -> Any:
        return _rebuilt, (str(self._device), self.initial_seed(), self.get_state())


def remote_generator(generator: torch.Generator) -> RemoteGenerator | None:
    """Return the remote generator that PyTorch has passed on; ``None`` for one of another device."""
    return _known.get(generator._cdata)  # type: ignore[attr-defined]  # missing from the stub


def _rebuilt(device: str, seed: int, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed).set_state(state)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)
