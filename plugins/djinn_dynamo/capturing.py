"""Lets Dynamo capture functions of remote tensors for this backend; for others, it leaves them to eager as before.

To Dynamo, a lazy tensor is an ordinary tensor of another device: it is faked as one, so nothing
of djinn is traced, and its guards are those that Dynamo checks in C++. Dynamo has no seam for a tensor subclass that
dispatches but does not consist of other tensors, so its own table of types gets an entry.
"""

from __future__ import annotations

from typing import Any

import torch._functorch.config
from torch._dynamo.variables import builder

from djinn.record import devices
from djinn.record.tensor import LazyTensor

BACKEND_NAME = "djinn"


def let_dynamo_capture() -> None:
    """Register lazy tensors with Dynamo. Called once per process."""
    infer = builder.infer_subclass_type
    builder.infer_subclass_type = lambda value: None if type(value) is LazyTensor else infer(value)
    for traces_numpy in (False, True):
        builder.VariableBuilder._type_dispatch_impl(traces_numpy)[LazyTensor] = _wrap
    # An ordinary tensor beside a remote one is uploaded, which Dynamo would refuse.
    torch._functorch.config.fake_tensor_prefer_device_type = devices.logical_device().type


def _wrap(self: builder.VariableBuilder, value: LazyTensor) -> Any:
    """Make Dynamo's variable for a lazy tensor."""
    if getattr(self.tx.output.compiler_fn, "compiler_name", "") == BACKEND_NAME:
        return self.wrap_tensor(value)
    # As if it were not in the table. Dynamo compiles in one thread at a time.
    table = self._type_dispatch()
    del table[LazyTensor]
    try:
        return self._wrap(value)
    finally:
        table[LazyTensor] = _wrap
