"""Attention by the executor's own choice of a kernel, for devices whose kernels this process does not have.

Without gradients, a call is recorded as one operator. With gradients, the executor is asked once for each combination
of metadata which kernel it takes; if that is the decomposed form, PyTorch decomposes the call here, as eager would
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from djinn.session import runtime
from djinn_plugins.common.operators.attention import attention_operators
from djinn_plugins.device.interceptor import gradients

__all__ = ("attend_remotely",)

MAX_CHOICES = 4096
_choices: dict[tuple[Any, ...], int] = {}
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Attention(torch.autograd.Function):
    """Attention with the backward pass of the kernel that the executor takes."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        query, key, value, mask, *options = call
        out, sums, random = attention_operators().attend_with_residuals(query, key, value, mask, *options)
        ctx.save_for_backward(query, key, value, mask, out, sums, random)
        ctx.options = options
        attended: torch.Tensor = out
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out, sums, random = ctx.saved_tensors
        found = attention_operators().backward(gradient, out, sums, random, query, key, value, mask, *ctx.options)
        return *found, *(None,) * (1 + len(ctx.options))


def attend_remotely(decompose: Callable[[], Any], tensors: Sequence[torch.Tensor], options: Sequence[Any]) -> Any:
    """Record attention for the executor to choose a kernel.

    Args:
        decompose: Calls PyTorch's function, which is decomposed for this device.
        tensors: Query, key, value, and the mask if there is one.
        options: ``dropout_p``, ``is_causal``, ``scale`` and ``enable_gqa``.
    """
    query, key, value = tensors[:3]
    mask = tensors[3] if len(tensors) > 3 else None
    if not _fits(query, key, value, mask, is_grouped=options[3]) or gradients.is_transformed():
        return decompose()
    if not gradients.are_needed((*tensors,), {}):
        with _below_autograd():
            return attention_operators().attend(query, key, value, mask, *options)
    # A mask that is learned gets its gradient from the decomposed form only.
    if (mask is not None and mask.requires_grad) or _choice(tensors, options) == SDPBackend.MATH.value:
        return decompose()
    return _Attention.apply(query, key, value, mask, *options)  # type: ignore[no-untyped-call]  # untyped there


def _fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, is_grouped: bool
) -> bool:
    """Whether a call is one that fused kernels may take. If not, PyTorch's own function raises the error."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.dtype == key.dtype == value.dtype:
        return False
    heads, groups = query.shape[1], key.shape[1]
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return False
    if min(*query.shape, *key.shape, *value.shape) == 0 or not query.dtype.is_floating_point:
        return False
    if heads != groups and not (is_grouped and heads % groups == 0):
        return False
    full = (*query.shape[:3], key.shape[2])
    return mask is None or (mask.dim() in (2, 4) and mask.dtype in (torch.bool, query.dtype) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(mask.shape), reversed(full), strict=False)))


def _choice(tensors: Sequence[Any], options: Sequence[Any]) -> int:
    session = runtime.current()
    welcome = session.backend.welcome
    key = (welcome.session, session.switches, *(tensor._value.spec for tensor in tensors), len(tensors), *options)
    found = _choices.get(key)
    if found is None:
        query, keys, value, mask = (*tensors, None)[:4]
        with _below_autograd():
            found = int(attention_operators().kernel(query, keys, value, mask, *options))
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        _choices[key] = found
    return found
