"""Lets Dynamo capture functions of remote tensors for backends that run the graphs they are given.

Those that generate code for a kind of device know none for this one; from them, functions of remote tensors are kept.

To Dynamo, a lazy tensor is an ordinary tensor of another device: it is faked as one, so nothing
of djinn is traced, and its guards are those that Dynamo checks in C++. Dynamo has no seam for a tensor subclass that
dispatches but does not consist of other tensors, so its own table of types gets an entry.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo import exc, trace_rules
from torch._dynamo.backends import registry
from torch._dynamo.variables import builder

import djinn
from djinn.record.tensor import LazyTensor

_OWN_BACKEND = "djinn"
_OWN_FILES = tuple(f"{folder}{os.sep}" for folder in (Path(djinn.__file__).parent, Path(__file__).parents[2]))
"""How the paths of files of djinn and of its plugins begin."""

_OWN_GENERATED = tuple(f"<attrs generated {what} djinn" for what in ("methods", "init", "eq", "hash", "repr"))
"""How the names begin under which attrs compiles methods of djinn's classes."""


def let_dynamo_capture() -> None:
    """Register lazy tensors with Dynamo, which the program has imported. Called once in a process."""
    # What djinn does for an operation is not the program's, wherever it is called from.
    trace_rules.SKIP_DIRS.extend(_OWN_FILES)
    trace_rules._recompile_re()
    trace_rules.get_mod_skiplist().update(_OWN_GENERATED)
    infer = builder.infer_subclass_type
    builder.infer_subclass_type = lambda value: None if type(value) is LazyTensor else infer(value)
    for traces_numpy in (False, True):
        builder.VariableBuilder._type_dispatch_impl(traces_numpy)[LazyTensor] = _wrap
    registry.register_backend = _registering(registry.register_backend)
    # An ordinary tensor beside a remote one is uploaded, which Dynamo would refuse.
    torch._functorch.config.fake_tensor_prefer_device_type = torch._C._get_privateuse1_backend_name()
    ours: Any = LazyTensor
    ours.__coerce_same_metadata_as_tangent__ = _as_tangent


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    """Let several threads be the first to look up a backend of an entry point: each registers it, PyTorch takes one."""
    lock = threading.Lock()

    @functools.wraps(register)
    def register_once(compiler_fn: Any = None, name: str | None = None, tags: Sequence[str] = ()) -> Any:
        with lock:
            if compiler_fn is not None and registry._COMPILER_FNS.get(name or "") is compiler_fn:
                return compiler_fn
            return register(compiler_fn, name, tags)

    return register_once


def _wrap(self: builder.VariableBuilder, value: LazyTensor) -> Any:
    """Make Dynamo's variable for a lazy tensor."""
    if _runs_graphs(self.tx.output.compiler_fn):
        return self.wrap_tensor(value)
    raise exc.SkipFrame("The backend generates no code for remote tensors; use backend='djinn'.")


def _as_tangent(self: LazyTensor, metadata: Any, expected: type = LazyTensor) -> LazyTensor | None:
    """Return the gradient of a result, which AOTAutograd expects to be an ordinary tensor, as it has faked it."""
    return self if expected is torch.Tensor else None


def _runs_graphs(compiler: Any) -> bool:
    """Whether a backend runs the operators of a graph: this one, a program's own, and PyTorch's for debugging."""
    name = getattr(getattr(compiler, "_torchdynamo_orig_backend", compiler), "compiler_name", "")
    return name == _OWN_BACKEND or name not in registry.list_backends(exclude_tags=("debug",))
