"""How an operation is executed, by name and arguments, as earlier documents ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn.errors import UnknownOperatorError
from djinn.kinds import Classifier, OperationClass
from djinn.plugins import DEFAULTS
from djinn.session import runtime

__all__ = ("FETCHING", "OperationClassifier", "packet_named")

FETCHING = frozenset("__bool__ all_true cpu cuda is_nonzero item numpy to_numpy tolist".split())
"""Methods that return Python values or ordinary tensors, and are no operators of PyTorch's dispatcher."""


class OperationClassifier:
    """Asks the running session's classifier."""

    @classmethod
    def classify(
        cls, operation: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> OperationClass:
        """Return how an operation is executed.

        Args:
            operation: A name such as ``aten::argmax`` or ``argmax``, with or without an overload.
            args: Its arguments; they choose the overload. Only their number and types matter.
            kwargs: Its keyword arguments.

        Raises:
            UnknownOperatorError: PyTorch has no such operator.
        """
        name, _, overload = operation.rpartition("::")[2].partition(".")
        if name in FETCHING:
            return OperationClass.TRIGGER
        packet = packet_named(operation)
        classifier: Classifier = runtime.current().plugins.choose("classifier", DEFAULTS["classifier"])
        return classifier.classify(getattr(packet, overload or _overload_for(packet, len(args), kwargs or {})))


def packet_named(operation: str) -> Any:
    """Find an operator by a name with or without namespace and overload; also by the name of a function over it.

    Raises:
        UnknownOperatorError: PyTorch has no such operator.
    """
    namespace, _, name = operation.rpartition("::")
    name = name.partition(".")[0]
    operators = getattr(torch.ops, namespace or "aten")
    # torch.unique is torch.ops.aten._unique2.
    found = next((packet for known in (name, f"_{name}2", f"_{name}")
                  if (packet := getattr(operators, known, None)) is not None), None)
    if found is None:
        raise UnknownOperatorError(f"PyTorch has no operator {operation!r}.", hint="Names are those of torch.ops.")
    return found


def _overload_for(packet: Any, count: int, kwargs: Mapping[str, Any]) -> str:
    """Choose the first overload that takes as many arguments and those keywords."""
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        names = {argument.name for argument in arguments}
        plain = [argument for argument in arguments if not argument.kwarg_only]
        if count <= len(plain) and kwargs.keys() <= names and not any(argument.is_out for argument in arguments):
            return str(overload)
    return str(packet.overloads()[0])
