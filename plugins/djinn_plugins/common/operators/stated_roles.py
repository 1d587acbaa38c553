"""Roles of values that a client states, because only it knows which are gradients or states of an optimizer.

``djinn::state_role`` is recorded like any operation, so a role is stated in program order and without a round trip,
where the value is, and again by a replay. It is declared to write its argument, because it has an effect and no result;
it leaves the argument as it is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.memory import SessionMemory

__all__ = ("ROLE_OPERATORS", "STATED_ROLES", "state_into", "state_role")

STATED_ROLES: Final = ("weight", "gradient", "optimizer_state")
_SCHEMA = "(Tensor(a!) value, str role) -> ()"
ROLE_OPERATORS = frozenset(("djinn::state_role",))
"""Its name."""
_here = threading.local()


def state_into(memory: SessionMemory | None) -> None:
    """Let the operator, in this thread, state roles to the memory of a session; ``None`` for none."""
    _here.memory = memory


@once
def state_role() -> Any:
    """Return the operator; the first call defines it."""
    # A graph of a device's work would leave it out.
    (operator,) = define_operators({"state_role": _SCHEMA}, {"state_role": (_stated, _described)},
                                   {"state_role": torch.Tag.cudagraph_unsafe})
    return operator


def _stated(value: torch.Tensor, role: str) -> None:
    memory: SessionMemory | None = getattr(_here, "memory", None)
    if memory is not None and role in STATED_ROLES:
        memory.stated(value, role)


def _described(value: torch.Tensor, role: str) -> None:
    """Say that there is no result."""
