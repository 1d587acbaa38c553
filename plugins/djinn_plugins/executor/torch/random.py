"""A session's own random numbers, drawn from the device's default generator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from djinn_plugins.common.operators.random_states import checked_state


class TorchRandomState:
    """A generator state that is swapped in while a random program of the session runs.

    Operators such as dropout accept no generator except the default one. So the session uses that one during the run,
    and its previous state is restored afterwards.

    Args:
        device: The executor's device.
        seed: Where the stream starts.
        lock: Held while the state is swapped in.
        default_generator: Returns the device's default generator.
    """

    def __init__(
        self, device: torch.device, seed: int, lock: threading.RLock, default_generator: Callable[[], torch.Generator],
    ) -> None:
        self._device = device
        self._default_generator = default_generator
        self._lock = lock
        self._state = torch.Generator(device).get_state()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart from ``seed``."""
        self._state = torch.Generator(self._device).manual_seed(seed).get_state()

    def get(self) -> torch.Tensor:
        """Return the state, ``u8[N]``."""
        return self._state.clone()

    def set(self, state: torch.Tensor) -> None:
        """Continue from a state.

        Raises:
            RuntimeError, TypeError: It is not a state of this kind of device.
        """
        generator = torch.Generator(self._device)
        generator.set_state(checked_state(self._device.type, state))
        self._state = generator.get_state()

    @contextmanager
    def lent_to_device(self) -> Iterator[None]:
        """Make the device's default generator continue this stream within the context."""
        generator = self._default_generator()
        with self._lock:
            theirs = generator.get_state()
            generator.set_state(self._state)
            try:
                yield
            finally:
                self._state = generator.get_state()
                generator.set_state(theirs)
