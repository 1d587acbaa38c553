"""Handlers of functions in PyTorch's Python interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it

from djinn.kinds.interceptor import FunctionHandler
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.interceptor import (
    copying,
    exporting,
    gradients,
    losses,
    recurrent,
    remote_norms,
    remote_numbers,
    saving,
    tuples,
)
from djinn_plugins.device.interceptor import fast_path as shortcuts
from djinn_plugins.device.interceptor import in_place_move as adoption
from djinn_plugins.device.interceptor.attention import allowed_kernels, attend
from djinn_plugins.device.interceptor.interrupts import interrupts
from djinn_plugins.device.interceptor.matmul_decomposition import single

_without_functions = torch._C.DisableTorchFunctionSubclass
_ATTENTION = F.scaled_dot_product_attention
_below_autograd = torch._C._AutoDispatchBelowAutograd


def keep_whole(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a composite so that it is recorded whole when no gradient is needed.

    Composites are decomposed at the autograd dispatch keys. Without gradients, these do nothing else for a function
    that neither writes nor returns a view. Some composites are decomposed differently for tensor subclasses, and then
    round differently: they must be recorded whole so that results equal those of eager (see ``isTensorSubclassLike`` in
    aten/src/ATen/TensorSubclassLikeUtils.h).
    """
    call = functools.partial(attend, function) if function is _ATTENTION else function
    # One call: `torch.jit.trace` notes its line, and refuses a function whose second trace has another one.
    with _without_functions(), nullcontext() if gradients.are_needed(args, kwargs) else _below_autograd():
        return call(*args, **kwargs)


def keep_product(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep a product whole, or let autograd take it apart as it does for ordinary tensors."""
    if len(args) == 2 and isinstance(args[0], LazyTensor) and isinstance(args[1], LazyTensor) and (
            one := single(*args)) is not None and not gradients.is_transformed() and torch.is_grad_enabled():
        operand, other = args[one], args[1 - one]
        with _without_functions():
            if other.requires_grad and not operand.requires_grad:
                repeated = operand.expand(other.shape[0], *operand.shape[1:])
                args = (other, repeated) if one else (repeated, other)
    return keep_whole(function, args, kwargs)


def keep_rms_norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record RMS norm whole, also if a gradient is needed and the executor's device has kernels for it."""
    if gradients.are_needed(args, kwargs):
        with _without_functions():
            made = remote_norms.rms_norm(runtime.current(), *args, **kwargs)
        if made is not NotImplemented:
            return made
    return keep_whole(function, args, kwargs)


def split_at_home(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Download the split positions; PyTorch requires them on the CPU."""
    home = [tensor.cpu() if isinstance(tensor, LazyTensor) and index else tensor for index, tensor in enumerate(args)]
    named = {name: item.cpu() if isinstance(item, LazyTensor) and name != "input" else item
             for name, item in kwargs.items()}
    with _without_functions():
        return function(*home, **named)


def cannot_be_nested(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return that a padded batch cannot become a nested tensor; `torch.nn.TransformerEncoder` asks before it makes one.

    It would take the ordinary path next in any case, because of the class of the tensors.
    """
    return False


def dropout(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor itself if the probability is 0 or training is off."""
    if len(args) == 1 and kwargs.get("training") is False and 0.0 <= kwargs.get("p", 0.5) <= 1.0:
        return args[0]
    return shortcuts.call_plainly(function, args, kwargs)


def record_stream(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do nothing: memory is freed in the order of the program, whichever streams its operations were recorded in."""


def run_backward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass, in which Ctrl-C raises where it can."""
    with interrupts, _without_functions():
        return function(*args, **kwargs)


def has_compatible_shallow_copy_type(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell ``Module.to`` how to move a parameter: by assigning its ``data``, or by swapping it with the new tensor.

    Either way, optimizers, tied weights and all other holders of the parameter see it move, as with any other
    accelerator. ``Module._apply`` swaps if the new tensor looks like a wrapper subclass; it only checks for these
    attributes and never calls them, and they do not outlive the conversion. PyTorch does not swap a tensor with weak
    references, such as those of the upload cache. Swapping exchanges attributes, too, so the new tensor gets those that
    others have attached to the parameter. Gradients follow their parameters. To and from the meta device, a module gets
    new parameters instead, and other references to the old ones keep them, as in eager.
    """
    tensor, new = args
    if "meta" in (tensor.device.type, new.device.type):
        return False
    if isinstance(new, LazyTensor) and adoption.can_be_swapped(tensor):
        runtime.current().mixer.forget(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            new.__tensor_flatten__ = new.__tensor_unflatten__ = _not_traceable  # type: ignore[attr-defined]  # see above
            adoption.hand_over_attributes(tensor, new)
    return True


def _not_traceable(*_: Any) -> Any:
    raise NotImplementedError("A tensor on a remote accelerator does not consist of other tensors.")


_SINGLE = (
    "__eq__ __ge__ __gt__ __le__ __lt__ __ne__ abs add addmm argmax bitwise_not bmm cat clamp cos div embedding eq exp "
    "ge gelu gt le log log_softmax logical_not lt maximum mean minimum mm mul ne neg pow reciprocal relu rsqrt sigmoid "
    "silu sin softmax sqrt square stack sub sum tanh where"
).split()
"""Functions that usually result in one operation."""
_SHORT = [getattr(owner, name) for name in _SINGLE for owner in (torch, torch._C.TensorBase, torch._C._nn, F)
          if hasattr(owner, name)]

FUNCTIONS: Mapping[Callable[..., Any], FunctionHandler] = {
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad), run_backward),
    **dict.fromkeys(
        (
            F.linear, F.layer_norm, F.group_norm, torch.layer_norm, torch.group_norm, torch.norm, torch.Tensor.norm,
            torch.nuclear_norm, torch.linalg.norm, torch.linalg.matrix_norm, torch.linalg.cond, torch.linalg.svdvals,
            torch.linalg.eigvalsh, F.max_pool1d, torch.max_pool1d,
        ),
        shortcuts.shortened(keep_whole),
    ),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__),
                    shortcuts.shortened(keep_product)),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), shortcuts.shortened(keep_rms_norm)),
    _ATTENTION: shortcuts.shortened(keep_whole, allowed_kernels),
    **dict.fromkeys(_SHORT, shortcuts.shortened(shortcuts.call_plainly)),
    **{function: shortcuts.shortened(remote_numbers.call) if function in _SHORT else remote_numbers.call
       for function in remote_numbers.TAKING},
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), split_at_home),
    **tuples.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **gradients.FUNCTIONS,
    **exporting.FUNCTIONS,
    **({F.linear_cross_entropy: losses.linear_cross_entropy} if hasattr(F, "linear_cross_entropy") else {}),
    F.dropout: dropout,
    torch.Tensor.record_stream: record_stream,
    torch.Tensor.untyped_storage: saving.untyped_storage,
    torch.Tensor.storage: saving.storage,
    torch.Tensor.share_memory_: saving.cannot_be_shared,
    torch.Tensor.__reduce_ex__: saving.reduce,
    torch.Tensor.__deepcopy__: copying.deepcopy,
    torch.Tensor.data.__set__: adoption.move_home,  # type: ignore[attr-defined]  # a descriptor implemented in C
    torch._nested_tensor_from_mask_left_aligned: cannot_be_nested,
    torch._has_compatible_shallow_copy_type: has_compatible_shallow_copy_type,
}
