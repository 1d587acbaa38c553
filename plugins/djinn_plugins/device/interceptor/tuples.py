"""Operations that give several tensors return a `djinn.LazyTuple`, which is also what PyTorch would return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from djinn.kinds.interceptor import FunctionHandler
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.once import once
from djinn_plugins.device.interceptor.fast_path import call_plainly

__all__ = ("FUNCTIONS", "several")


def several(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, and return its results as one tuple that can be fetched in one round trip."""
    made = call_plainly(function, args, kwargs)
    if isinstance(made, tuple) and all(isinstance(item, LazyTensor) for item in made):
        return _class_for(type(made))(made)
    return made


@once
def _class_for(kind: type) -> Any:
    """Return the class for results of a class: tuples, or one of ``torch.return_types`` with names for its fields."""
    from djinn_plugins.schedule.lazy_tuple import LazyTuple

    names = [name for name in vars(kind) if isinstance(vars(kind)[name], _Field)]
    if not names:
        return LazyTuple
    made: Any = type(kind.__name__, (LazyTuple,), {
        "__slots__": (), "__module__": __name__, "__doc__": f"As ``{kind.__module__}.{kind.__name__}``, lazy.",
        # What is asked for PyTorch's class is an instance of it.
        "__class__": property(lambda self: kind),
        "__repr__": lambda self: repr(kind(tuple(self))),
        "__reduce__": lambda self: (kind, (tuple(self),)),
        **{name: property(itemgetter(position)) for position, name in enumerate(names)},
    })
    register_pytree_node(made, lambda members: (list(members), None), lambda members, _: kind(tuple(members)),
                         serialized_type_name=f"djinn.{kind.__name__}")
    return made


_Field = type(vars(torch.return_types.topk)["values"])
"""The class of the fields of ``torch.return_types``."""
_NAMES = ("chunk", "sort", "split", "topk", "unbind")
FUNCTIONS: Mapping[Callable[..., Any], FunctionHandler] = dict.fromkeys(
    [getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor)], several)
"""Handlers of the functions that earlier documents name."""
