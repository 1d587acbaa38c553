"""Attention on a device whose kernels a client cannot choose among, as operators of the namespace ``djinn``.

Which kernel PyTorch uses depends on the device, on cuDNN, and on the metadata of each call, and the kernels lay their
results out differently. These operators choose where they run, as PyTorch does there, and give every result one layout,
that of flash attention: heads side by side. So a client knows the metadata of each result without a question.

For gradients, one operator returns the result with what its backward pass needs, always in the same form: the logarithm
of the sums of the softmax, with rows padded to a multiple of 32, and the position of the random numbers. If the choice
is the decomposed form, which ``scaled_dot_product_attention_kernel`` tells, the client records that form instead.

Source:
    ``scaled_dot_product_attention`` of aten/src/ATen/native/transformers/attention.cpp, PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it
from torch.nn.attention import SDPBackend

from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators

__all__ = ("ATTENTION_OPERATORS", "AttentionOperators", "attention_operators", "dtype_of_sums", "padded_rows")

_ARGUMENTS = ("Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
              "float? scale, bool enable_gqa")
_BASE = "scaled_dot_product_attention"
_SCHEMAS = {
    _BASE: f"({_ARGUMENTS}) -> Tensor",
    f"{_BASE}_kernel": f"({_ARGUMENTS}) -> int",
    f"{_BASE}_with_residuals": f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    f"{_BASE}_backward": f"(Tensor grad_out, Tensor out, Tensor logsumexp, Tensor random, {_ARGUMENTS}) "
                         "-> (Tensor, Tensor, Tensor)",
}
ATTENTION_OPERATORS = frozenset(f"djinn::{name}" for name in _SCHEMAS)
"""Their names. None writes to an argument, or returns a view of one."""
_ROWS = 32
"""The memory-efficient kernel pads rows to a multiple of this."""
_WIDTH = 8
"""Flash attention takes heads whose width is a multiple of this."""
_HIDDEN_CUDNN = -65504.0
"""What PyTorch adds to hidden scores before it calls cuDNN, which has no infinity."""
aten = torch.ops.aten


class AttentionOperators(NamedTuple):
    """The operators.

    Attributes:
        attend: Returns the result, for calls without gradients.
        kernel: Returns which kernel PyTorch chooses if gradients are needed; a value of ``SDPBackend``.
        attend_with_residuals: Returns the result with what the backward pass needs.
        backward: Returns the gradients of query, key and value.
    """

    attend: Any
    kernel: Any
    attend_with_residuals: Any
    backward: Any


@once
def attention_operators() -> AttentionOperators:
    """Return the operators; the first call defines them."""
    kernels = {_BASE: (_attend, _attend_meta), f"{_BASE}_kernel": (_choose, None),
               f"{_BASE}_with_residuals": (_attend_with_residuals, _with_residuals_meta),
               f"{_BASE}_backward": (_backward, _backward_meta)}
    random = dict.fromkeys((name for name in _SCHEMAS if not name.endswith("backward")),
                           torch.Tag.nondeterministic_seeded)
    return AttentionOperators(*define_operators(_SCHEMAS, kernels, random))


def padded_rows(rows: int) -> int:
    """Return the length of the rows of ``logsumexp``."""
    return -(-rows // _ROWS) * _ROWS


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of ``logsumexp``."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _size(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    return (*query.shape[:3], value.shape[3])


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    _, heads, rows, width = (max(extent, 1) for extent in size)
    return rows * heads * width, width, heads * width, 1


def _laid_out(attended: torch.Tensor) -> torch.Tensor:
    size = tuple(attended.shape)
    if attended.transpose(1, 2).is_contiguous():
        return attended if attended.stride() == _strides(size) else attended.as_strided(size, _strides(size))
    return torch.empty_strided(size, _strides(size), dtype=attended.dtype, device=attended.device).copy_(attended)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:
    return _laid_out(F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))


def _attend_meta(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    size = _size(query, value)
    return torch.empty_strided(size, _strides(size), dtype=query.dtype, device="meta")


def _choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> int:
    # PyTorch looks whether they require gradients. Nothing is computed with these.
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    return torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                   enable_gqa=enable_gqa)


class _Call(NamedTuple):
    """A call, after the preparations that PyTorch makes for the chosen kernel."""

    kernel: SDPBackend
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scale: float

    @property
    def is_on_cpu(self) -> bool:
        return self.query.device.type == "cpu"


def _prepared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
              dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> _Call:
    kernel = SDPBackend(_choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    bias = attn_mask
    if bias is not None and bias.dtype is torch.bool:
        hidden = _HIDDEN_CUDNN if kernel == SDPBackend.CUDNN_ATTENTION else -math.inf
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), hidden)
    if bias is not None and kernel == SDPBackend.EFFICIENT_ATTENTION:
        bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
    wanted = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    if kernel == SDPBackend.FLASH_ATTENTION and query.device.type != "cpu":
        query, key, value = map(_widened, (query, key, value))
    return _Call(kernel, query, key, value, bias, wanted)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Let rows of a bias begin at multiples of 16 elements, as PyTorch does for the memory-efficient kernel."""
    if all(stride % 16 == 0 for stride in bias.stride()[:-1]) and bias.stride(-1) == 1:
        return bias
    columns = bias.shape[-1]
    return F.pad(bias, (0, -columns % 16 or 16))[..., :columns]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    lacking = -tensor.shape[-1] % _WIDTH
    return F.pad(tensor, (0, lacking)) if lacking else tensor


def _attend_with_residuals(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _prepared(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = call.query, call.key, call.value
    random = None
    if call.is_on_cpu and call.kernel == SDPBackend.FLASH_ATTENTION:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *given, dropout_p, is_causal, attn_mask=call.bias, scale=scale)
    elif call.kernel == SDPBackend.FLASH_ATTENTION:
        out, sums, _, _, _, _, state, *_ = aten._scaled_dot_product_flash_attention(
            *given, dropout_p, is_causal, scale=call.scale)
        random = state.view(torch.int64)
    elif call.kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, sums, *drawn = aten._scaled_dot_product_efficient_attention(
            *given, call.bias, compute_log_sumexp=True, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        random = torch.stack([item.reshape(()) for item in drawn])
    elif call.kernel == SDPBackend.CUDNN_ATTENTION:
        out, sums, _, _, _, _, *drawn, _ = aten._scaled_dot_product_cudnn_attention(
            *given, call.bias, compute_log_sumexp=True, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        random = torch.stack([item.reshape(()) for item in drawn])
    else:
        raise _no_kernel(call.kernel)
    rows = query.shape[2]
    size = (*query.shape[:2], padded_rows(rows))
    made = torch.zeros(size, dtype=dtype_of_sums(query.dtype), device=query.device)
    made[..., :rows] = sums.reshape(*query.shape[:2], -1)[..., :rows]
    if random is None or not dropout_p:
        random = torch.zeros(2, dtype=torch.int64)
    return _laid_out(out[..., : value.shape[3]]), made, random.to(query.device)


def _with_residuals_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = (*query.shape[:2], padded_rows(query.shape[2]))
    sums = torch.empty(size, dtype=dtype_of_sums(query.dtype), device="meta")
    return _attend_meta(query, key, value), sums, torch.empty(2, dtype=torch.int64, device="meta")


def _no_kernel(kernel: SDPBackend) -> RuntimeError:
    return RuntimeError(f"scaled_dot_product_attention: {kernel.name} has no backward pass as a whole.")


def _backward(
    grad_out: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, random: torch.Tensor, query: torch.Tensor,
    key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> tuple[torch.Tensor, ...]:
    call = _prepared(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = call.query, call.key, call.value
    rows, columns = query.shape[2], key.shape[2]
    sums = logsumexp[..., :rows].contiguous()
    if call.is_on_cpu and call.kernel == SDPBackend.FLASH_ATTENTION:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *given, out, sums, dropout_p, is_causal, attn_mask=call.bias, scale=scale)
    elif call.kernel == SDPBackend.FLASH_ATTENTION:
        found = aten._scaled_dot_product_flash_attention_backward(
            _widened(grad_out), *given, _widened(out), sums, None, None, rows, columns, dropout_p, is_causal,
            random.view(torch.uint64), torch.empty((), dtype=torch.uint64, device=query.device), scale=call.scale)
    elif call.kernel == SDPBackend.EFFICIENT_ATTENTION:
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, *given, call.bias, out, logsumexp, *_drawn(random, dropout_p), dropout_p,
            [True, True, True, False], is_causal, scale=scale)
    elif call.kernel == SDPBackend.CUDNN_ATTENTION:
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, *given, out, sums.unsqueeze(-1), *_drawn(random, dropout_p), call.bias, None, None, rows, columns,
            dropout_p, is_causal, scale=scale)
    else:
        raise _no_kernel(call.kernel)
    return tuple(gradient[..., : tensor.shape[3]].contiguous()
                 for gradient, tensor in zip(found, (query, key, value), strict=False))


def _drawn(random: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seed and offset where their kernels read them: on the host, unless they are not read."""
    seed, offset = (random.cpu() if dropout_p else random).unbind()
    return seed, offset


def _backward_meta(
    grad_out: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, random: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in given[:3])
