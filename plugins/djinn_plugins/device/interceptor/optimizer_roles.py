"""States the roles of gradients and of optimizers' states to a server that moves values when memory is short.

After a step, the optimizer has them all. States stay where they are, so they are stated once. Each step has new
gradients, which are stated by the same operations of the same program. Other servers are sent nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn.session.session import Session
from djinn_plugins.common.operators.stated_roles import state_role

__all__ = ("state_roles",)

MIN_BYTES = 2**14
"""Smaller values make no room."""
_stated: WeakKeyDictionary[torch.optim.Optimizer, ref[Session]] = WeakKeyDictionary()
"""The session that the states of an optimizer were stated to."""


def state_roles(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """State the roles; called after each step of an optimizer."""
    if not runtime.is_initialized():
        return
    session = runtime.current()
    if not any(executor.welcome.memory_bytes for executor in session.backend.executors):
        return
    known = _stated.get(optimizer)
    found = [*_values(optimizer, only_gradients=known is not None and known() is session)]
    if found:
        _stated[optimizer] = ref(session)
    with torch.no_grad():
        for value, role in found:
            state_role()(value, role)


def _values(optimizer: torch.optim.Optimizer, *, only_gradients: bool) -> Iterator[tuple[LazyTensor, str]]:
    """List the large values of an optimizer on the device, with their roles."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            candidates: list[tuple[Any, str]] = [(parameter.grad, "gradient")]
            if not only_gradients:
                states = optimizer.state.get(parameter, {}).values()
                candidates += [(parameter, "weight"), *((value, "optimizer_state") for value in states)]
            for value, role in candidates:
                if isinstance(value, LazyTensor) and value.nbytes >= MIN_BYTES:
                    yield value, role
