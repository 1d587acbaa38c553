"""The operator ``djinn::exchange_random_state``: it continues a session's random numbers from another state.

It runs in program order like any operation that draws, so a generator needs no separate request.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators
from djinn_plugins.common.operators.random_states import checked_state

__all__ = ("EXCHANGE", "exchange_random_state")

EXCHANGE = "djinn::exchange_random_state"


def _exchange(state: torch.Tensor) -> torch.Tensor:
    """Make a device's default generator continue from ``state``; return the state that it had.

    Raises:
        RuntimeError, TypeError: It is no state of a generator of this device.
    """
    generator = (torch.default_generator if state.device.type == "cpu"
                 else torch.cuda.default_generators[state.device.index])
    given = checked_state(state.device.type, state)
    before = generator.get_state()
    generator.set_state(given)
    return before.to(state.device)


@once
def exchange_random_state() -> Any:
    """Return the operator; the first call defines it."""
    name = "exchange_random_state"
    [operator] = define_operators({name: "(Tensor state) -> Tensor"}, {name: (_exchange, torch.empty_like)},
                                  {name: torch.Tag.nondeterministic_seeded})
    return operator
