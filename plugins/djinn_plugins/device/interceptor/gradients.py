"""Gradients across devices: ordinary tensors that are mixed with lazy ones get ordinary gradients.

An operation that mixes both is handled below autograd, which cannot move a gradient between devices. If a gradient is
needed, the operation is aborted there and called again with arguments that were moved in a differentiable way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from djinn.ir.spec import tensors_in
from djinn.record import devices
from djinn.record.dispatcher import pending_errors
from djinn.record.tensor import HostGradientError, LazyTensor, MixedGradientError
from djinn.session import runtime
from djinn_plugins.device.interceptor.optimizer_roles import state_roles


class _Upload(torch.autograd.Function):
    """Uploads a tensor once per version; the gradient is downloaded."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        lifted: torch.Tensor = runtime.current().mixer.upload(tensor)
        return lifted.detach()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].cpu()


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a transform of ``torch.func`` is active."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def are_needed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd has to see a call with these arguments."""
    if is_transformed():
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in tensors_in((args, tuple(kwargs.values()))))


def _upload(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor) or not tensor.requires_grad:
        return tensor
    if is_transformed():
        return tensor.to(devices.logical_device())
    made: torch.Tensor = _Upload.apply(tensor)  # type: ignore[no-untyped-call]  # untyped there
    return made


def _bring_home(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if isinstance(tensor, LazyTensor) else tensor


def _again(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def handle(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moved_args, moved_kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, move, (args, kwargs))
        before, after = (torch.utils._pytree.tree_leaves(tree) for tree in ((args, kwargs), (moved_args, moved_kwargs)))
        if all(old is new for old, new in zip(before, after, strict=True)):
            # The mixed tensors are not among the arguments: raise the original exception again.
            raise  # noqa: PLE0704  # called where it was caught
        return function(*moved_args, **moved_kwargs)

    return handle


def adapt_backward_passes() -> None:
    """Let backward passes run hooks and functions of Python as forward passes do, and raise what ended them.

    A handler starts a pass of lazy tensors without ``__torch_function__``, and PyTorch would leave it disabled
    for hooks, recomputation and custom functions: storages would be those of a wrapper without memory, and composites
    would be decomposed that a forward pass keeps whole.

    All of a pass runs in the caller's thread, also one that begins at a wrapper of ``torch.func`` or at an ordinary
    tensor. Autograd has one thread for each device that existed at the process's first pass. This device may have been
    registered later, its operations are only recorded, and a device guard takes over the errors of its own thread (see
    `djinn_plugins.device.interceptor.backend.DeviceGuard`).
    """
    changed: Any = torch.autograd
    changed._engine_run_backward = _adapted(changed._engine_run_backward)


def _adapted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not runtime.is_initialized():
            return original(outputs, *args, **kwargs)
        is_lazy = any(isinstance(item, LazyTensor) for item in outputs)
        try:
            with torch.autograd.set_multithreading_enabled(False), (
                    torch._C._EnableTorchFunction() if is_lazy else nullcontext()):
                return original(outputs, *args, **kwargs)
        except SystemError:
            taken = pending_errors.pop(get_ident(), None)
            if taken is None:
                raise
            raise taken from None

    return engine_run_backward


def notice_optimizers() -> None:
    """Upload tensors again that a fused optimizer has written, as PyTorch does not count those writes; state roles."""
    register_optimizer_step_post_hook(_forget_uploads)
    register_optimizer_step_post_hook(state_roles)


def _forget_uploads(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not runtime.is_initialized():
        return
    forget = runtime.current().mixer.forget
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                forget(parameter)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    MixedGradientError: _again(_upload),
    HostGradientError: _again(_bring_home),
}
