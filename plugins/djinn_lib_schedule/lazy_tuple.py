"""The results of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from djinn.record import devices

__all__ = ("LazyTuple",)


class LazyTuple(tuple[Any, ...]):
    """Several lazy tensors that can be fetched together."""

    __slots__ = ()

    def materialize(self) -> tuple[torch.Tensor, ...]:
        """Bring every element home in one round trip."""
        return tuple(devices.current_session().materialize(list(self)))

    def tolist(self) -> list[Any]:
        """List the values of every element, all fetched in one round trip."""
        return [home.tolist() for home in self.materialize()]


register_pytree_node(LazyTuple, lambda members: (list(members), None), lambda members, _: tuple(members),
                     serialized_type_name="djinn.LazyTuple")
