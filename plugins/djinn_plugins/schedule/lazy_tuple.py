"""The results of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_map_only

import djinn

__all__ = ("LazyResult", "LazyTuple")


class LazyTuple(tuple[Any, ...]):
    """Several lazy tensors, or structures of them, that can be fetched together."""

    __slots__ = ()

    def materialize(self) -> Any:
        """Fetch every element in one round trip."""
        return djinn.materialize(tuple(self))

    def tolist(self) -> Any:
        """List the values of every element, all fetched in one round trip."""
        return list(tree_map_only(torch.Tensor, lambda home: home.tolist(), self.materialize()))


class LazyResult(LazyTuple):
    """One tensor that a model has returned: ``result[0]`` is the tensor.

    For all else, it stands for the tensor itself. It has the tensor's attributes and operators, and functions of
    PyTorch take it.
    """

    __slots__ = ()
    __hash__ = tuple.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda result: result[0], (args, kwargs or {}),
                                     is_leaf=lambda item: isinstance(item, cls))
        return func(*args, **kwargs)

    def materialize(self) -> torch.Tensor:
        """Fetch the tensor's data."""
        made: torch.Tensor = djinn.materialize(self[0])
        return made

    def tolist(self) -> Any:
        """Return the tensor's data as nested lists."""
        return self.materialize().tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


def _of_tensor(name: str) -> Any:
    return lambda result, *given: getattr(result[0], name)(*given)


for _name in (
    "abs add and array bool complex eq float floordiv format ge gt index int invert le lt matmul mod mul ne neg or "
    "pos pow radd rfloordiv rmatmul rmod rmul rpow rsub rtruediv sub truediv xor"
).split():
    setattr(LazyResult, f"__{_name}__", _of_tensor(f"__{_name}__"))
register_pytree_node(LazyTuple, lambda members: (list(members), None), lambda members, _: tuple(members),
                     serialized_type_name="djinn.LazyTuple")
register_pytree_node(LazyResult, lambda members: (list(members), None), lambda members, _: next(iter(members)),
                     serialized_type_name="djinn.LazyResult")
