"""The operator ``djinn::exchange_random_state``: it continues a session's random numbers from another state.

It runs in program order like any operation that draws, so a generator needs no request of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ("EXCHANGE", "exchange_random_state")

EXCHANGE = "djinn::exchange_random_state"
_libraries: list[torch.library.Library] = []
"""Registrations are valid for the lifetime of these objects."""


def _exchange(state: torch.Tensor) -> torch.Tensor:
    """Make a device's default generator continue from ``state``; return the state that it had.

    Raises:
        RuntimeError, TypeError: It is no state of a generator of this device.
    """
    generator = (torch.default_generator if state.device.type == "cpu"
                 else torch.cuda.default_generators[state.device.index])
    before = generator.get_state()
    generator.set_state(state.cpu())
    return before.to(state.device)


@cache
def exchange_random_state() -> Any:
    """Return the operator; the first call defines it."""
    library = torch.library.Library("djinn", "FRAGMENT")
    library.define("exchange_random_state(Tensor state) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    for key in ("CPU", "CUDA"):
        library.impl("exchange_random_state", _exchange, key)
    library.impl("exchange_random_state", torch.empty_like, "Meta")
    _libraries.append(library)
    return torch.ops.djinn.exchange_random_state.default
