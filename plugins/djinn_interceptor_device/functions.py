"""Functions of PyTorch's Python interface that are carried out in a special way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it
from torch.autograd import forward_ad

from djinn.kinds.interceptor import FunctionHandler
from djinn.tensor import LazyTensor, pending_errors
from djinn_interceptor_device import recurrent
from djinn_interceptor_device.attention import attend

_without_functions = torch._C.DisableTorchFunctionSubclass
_ATTENTION = F.scaled_dot_product_attention
_below_autograd = torch._C._AutoDispatchBelowAutograd


def keep_whole(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite so that it arrives whole when no gradient is needed.

    Autograd's keys are what takes composites apart. Without gradients nothing else happens there for a function that
    neither writes nor returns a view.
    """
    needs_autograd = (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
    call = functools.partial(attend, function) if function is _ATTENTION else function
    with _without_functions():
        if needs_autograd:
            return call(*args, **kwargs)
        with _below_autograd():
            return call(*args, **kwargs)


def run_backward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass in the caller's thread; raise what a device guard took over (see `backend.DeviceGuard`).

    Autograd has one thread per device that existed when the first backward pass of the process began. This device may
    be younger than that, and its operations are only recorded: a thread of its own would win nothing.
    """
    try:
        with _without_functions(), torch.autograd.set_multithreading_enabled(False):
            return function(*args, **kwargs)
    except SystemError:
        if pending_errors:
            raise pending_errors.pop() from None
        raise


def has_compatible_shallow_copy_type(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell ``Module.to`` that assigning ``.data`` of a lazy parameter moves it, whatever it is given."""
    return isinstance(args[0], LazyTensor)


FUNCTIONS: Mapping[Callable[..., Any], FunctionHandler] = {
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad), run_backward),
    **dict.fromkeys(
        (
            F.linear, F.scaled_dot_product_attention, F.layer_norm, F.group_norm, F.rms_norm, torch.layer_norm,
            torch.group_norm, torch.rms_norm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
        ),
        keep_whole,
    ),
    **recurrent.FUNCTIONS,
    torch._has_compatible_shallow_copy_type: has_compatible_shallow_copy_type,
}
