"""The operation behind a lazy tensor, as its attributes: looked up when a program asks, never while it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from djinn.errors import UnknownOperatorError
from djinn.record import devices
from djinn.record.tensor import LazyTensor

__all__ = ("MEMBERS", "record")


def operation(tensor: LazyTensor) -> str:
    """The operation that gives the tensor, while it is pending or its capture is the thread's last; else ``""``."""
    from djinn_plugins.graph.operation import operation_name

    pending = devices.current_session().producer_of(tensor)
    if pending:
        return operation_name(pending)
    node = _node(tensor)
    return "" if node is None else node.operation


def inputs(tensor: LazyTensor) -> list[Any]:
    """The positional arguments of that operation.

    A tensor that the program no longer holds appears as the node of the graph that gives it.
    """
    node = _node(tensor)
    if node is None:
        return []
    from djinn_plugins.graph.graph import Operand
    from djinn_plugins.schedule.inputs import Outside, alive_values

    specs = dict(zip(node.inputs, node.input_specs, strict=False))
    alive = alive_values(devices.current_session(),
                         [Outside(value, "", "", spec, is_written=False) for value, spec in specs.items()])

    def filled(item: Any) -> Any:
        if isinstance(item, Operand):
            value = node.inputs[item.position]
            return alive.get(value) if value in alive else getattr(value, "producer", None) or value
        return [filled(member) for member in item] if isinstance(item, list | tuple) else item

    given = [filled(item) for item in node.arguments]
    # torch.randn(10, 10) has the inputs 10 and 10.
    return given[0] if not node.inputs and len(given) == 1 and isinstance(given[0], list) else given


def keywords(tensor: LazyTensor) -> Mapping[str, Any]:
    """The keyword arguments of that operation; constants of PyTorch such as dtypes are themselves."""
    node = _node(tensor)
    return {} if node is None else {name: _constant(name, item) for name, item in node.keywords.items()}


def metadata(tensor: LazyTensor) -> Mapping[str, Any]:
    """The annotations of that operation, which are computed now; empty if nothing is known of it."""
    node = _node(tensor)
    return {} if node is None else node.metadata


def physical_device(tensor: LazyTensor) -> torch.device:
    """Where the tensor's memory in this process is: nowhere."""
    return torch.device("meta")


def _node(tensor: LazyTensor) -> Any:
    from djinn_plugins.graph.capture import recorded_node

    return recorded_node(tensor)


def _constant(name: str, item: Any) -> Any:
    if name == "device" and item is not None:
        return devices.logical_device()
    is_constant = isinstance(item, str) and name in ("dtype", "layout", "memory_format")
    known = getattr(torch, item, None) if is_constant else None
    return item if known is None else known


MEMBERS: Mapping[str, Callable[[LazyTensor], Any]] = {
    "operation": operation, "inputs": inputs, "kwargs": keywords, "metadata": metadata,
    "_physical_device": physical_device,
}
"""Attributes that the class of lazy tensors gains."""


def record(
    operation: str, inputs: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **more: Any
) -> torch.Tensor:
    """Record an operation by name, and return the lazy tensor that it gives.

    Args:
        operation: For example ``aten::add``, or ``aten::add.Tensor`` for one overload.
        inputs: Its arguments.
        kwargs: Its keyword arguments.
        **more: What earlier documents give a tensor as well: ``shape``, ``dtype``, ``device``, ``metadata``. The
            operation determines the first two, and everything is on the remote device.

    Raises:
        UnknownOperatorError: There is no such operation.
        TypeError: An argument of another name is given.
    """
    if unknown := more.keys() - {"shape", "dtype", "device", "metadata"}:
        raise TypeError(f"LazyTensor() got an unexpected keyword argument {min(unknown)!r}")
    namespace, _, name = operation.rpartition("::")
    name, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if found is None:
        raise UnknownOperatorError(f"PyTorch has no operator {operation!r}.", hint="Names are those of torch.ops.")
    given = dict(kwargs or {})
    if not any(isinstance(item, torch.Tensor) for item in torch.utils._pytree.tree_leaves(list(inputs))):
        given.setdefault("device", devices.logical_device())
    made: torch.Tensor = (getattr(found, overload) if overload else found)(*inputs, **given)
    return made
