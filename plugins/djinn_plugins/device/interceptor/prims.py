"""Operators of ``torch._prims``, to which ``torch._refs`` and some decompositions lead, by way of ATen's.

A server runs no operator of this namespace, because each is Python code that calls operators of ATen. The same code
runs here: it checks the arguments as eager does, and records what it calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch._prims

from djinn.kinds.interceptor import Handler

if TYPE_CHECKING:
    from djinn.session.session import Session


def _through_aten(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator.prim_impl(*args, **kwargs)


@cache
def handlers() -> Mapping[torch._ops.OpOverload, Handler]:
    """Return the handlers of the operators that this release of PyTorch has."""
    packets: list[Any] = [getattr(torch.ops.prims, name, None) for name in torch._prims.__all__]
    return {packet.default: _through_aten for packet in packets if hasattr(packet, "prim_impl")}
