"""Attention, by the same kernel that eager uses on the executor's device.

PyTorch chooses its attention kernel by device, and does not know this device. The kernels differ in rounding and in the
layout of the result. Therefore the choice is made here, for the type of the executor's device, with stand-ins that have
the arguments' metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from djinn.ir.spec import TensorSpec
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.common.device_report import device_of
from djinn_plugins.device.interceptor import autocast

_choices: dict[tuple[Any, ...], bool] = {}
MAX_CHOICES = 4096


def attend(
    function: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call ``scaled_dot_product_attention``; the arguments are those of PyTorch's function.

    An executor that has other kernels chooses among them. Otherwise the function is decomposed if eager would not use
    the fused CPU kernel, or the executor's device is not a CPU.
    """
    if autocast.is_on():
        return autocast.lowered(functools.partial(attend, function), (query, key, value, attn_mask),
                                {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
                                 "enable_gqa": enable_gqa})
    tensors = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    decompose = functools.partial(
        function, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not all(type(tensor) is LazyTensor for tensor in tensors):
        return decompose()
    device = device_of(runtime.current().backend.welcome)
    if device.attention:
        return _attend_remotely()(decompose, tensors, (float(dropout_p), is_causal, scale, enable_gqa))
    if (
        device.kind != "cpu"
        or (attn_mask is not None and attn_mask.requires_grad)
        or not _takes_flash([tensor._value.spec for tensor in tensors], dropout_p, is_causal, scale, enable_gqa)
    ):
        return decompose()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), hidden)
    # The kernel takes four dimensions; for three, eager adds one, if it uses the kernel at all.
    batched = query.dim() == 4
    if not batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(1, *((1,) * (3 - attn_mask.dim())), *attn_mask.shape)
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended if batched else attended.squeeze(0)


@functools.cache
def _attend_remotely() -> Callable[..., Any]:
    from djinn_plugins.device.interceptor.remote_attention import attend_remotely

    return attend_remotely


def allowed_kernels() -> tuple[bool, bool]:
    """Return which of its CPU kernels PyTorch may use, as set by ``torch.nn.attention.sdpa_kernel``."""
    return torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()


def _takes_flash(
    specs: list[TensorSpec], dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> bool:
    """Whether eager uses the fused CPU kernel for such arguments.

    Source:
        ``select_sdp_backend_cpp`` of aten/src/ATen/native/transformers/sdp_utils_cpp.cpp.
    """
    arguments = (*specs, dropout_p > 0, is_causal, scale, enable_gqa, allowed_kernels())
    found = _choices.get(arguments)
    if found is None:
        stand_ins = [torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="cpu").requires_grad_()
                     for spec in specs[:3]]
        query, key, value = stand_ins
        mask = None if len(specs) == 3 else torch.empty_strided(specs[3].size, specs[3].stride, dtype=specs[3].dtype)
        choice = torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, scale=scale,
                                        enable_gqa=enable_gqa)
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        found = _choices[arguments] = choice == SDPBackend.FLASH_ATTENTION.value
    return found


def kernel(*args: Any, **kwargs: Any) -> Any:
    """Execute attention that PyTorch's own functions call, such as ``multi_head_attention_forward``.

    These calls bypass function handlers, but not the dispatcher.
    """
    return attend(torch.ops.aten.scaled_dot_product_attention.default.decompose, *args, **kwargs)
