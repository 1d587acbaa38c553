"""Finding operators by name."""

from __future__ import annotations

import re

import torch

from djinn.errors import UnknownOperatorError
from djinn_plugins.common.operators.attention import ATTENTION_OPERATORS
from djinn_plugins.common.operators.norms import NORM_OPERATORS
from djinn_plugins.common.operators.recurrent import RECURRENT_OPERATORS
from djinn_plugins.common.operators.stored_models import STORED_TENSOR

__all__ = ("LAYER_OPERATORS", "is_as_declared", "operator_named")

LAYER_OPERATORS = ATTENTION_OPERATORS | NORM_OPERATORS | RECURRENT_OPERATORS
"""djinn's own operators that compute what belongs to one kernel of a device's library."""

_QUALIFIED = re.compile(r"(?P<namespace>\w{1,100})::(?P<name>\w{1,200})(\.(?P<overload>\w{1,100}))?")


def operator_named(name: str) -> torch._ops.OpOverload:
    """Find the overload with a qualified name, without creating anything for unknown names.

    Raises:
        UnknownOperatorError: This PyTorch has no such overload.
    """
    match = _QUALIFIED.fullmatch(name)
    overload = match["overload"] if match else None
    if match is None or not any(
        schema.overload_name == (overload or "")
        for schema in torch._C._jit_get_schemas_for_operator(f"{match['namespace']}::{match['name']}")
    ):
        raise UnknownOperatorError(f"PyTorch {torch.__version__} has no operator {name[:120]!r}.",
                                   hint="Install the same release on both sides, or the package that defines it.")
    packet = getattr(getattr(torch.ops, match["namespace"]), match["name"])
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(found.name()):
        # TorchScript's own operators, for integers and lists, have a schema but never reach a device.
        raise UnknownOperatorError(f"{name[:120]!r} cannot be called as an operator.")
    return found


def is_as_declared(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator has no effects besides those that its schema declares.

    Operators that neither PyTorch nor djinn defines may do anything.
    """
    return operator.namespace == "aten" or operator.name() in LAYER_OPERATORS or operator.name() == STORED_TENSOR
