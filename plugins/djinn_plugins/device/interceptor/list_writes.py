"""Operators that write to each tensor of a list: autograd counts their writes as on any other device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from djinn.kinds.interceptor import Handler
from djinn_plugins.device.interceptor.handlers import record

if TYPE_CHECKING:
    from djinn.session.session import Session

_PREFIX = "aten::_foreach_"


def _write_each(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record, and count the writes, so that a backward pass that needs the overwritten values is refused.

    These operators return nothing, and PyTorch itself only counts writes to returned tensors; the kernels of other
    devices also count the others themselves.

    Source:
        ``increment_version`` in aten/src/ATen/native/cuda/ForeachBinaryOpScalar.cu.
    """
    made = record(session, operator, args, kwargs)
    torch.autograd.graph.increment_version(args[0])
    return made


@cache
def handlers() -> Mapping[torch._ops.OpOverload, Handler]:
    """Return the handlers of the operators that this release of PyTorch has."""
    names = [name.partition(".") for name in torch._C._dispatch_get_all_op_names() if name.startswith(_PREFIX)]
    return {getattr(getattr(torch.ops.aten, base.removeprefix("aten::")), overload or "default"): _write_each
            for base, _, overload in names if base.endswith("_")}
