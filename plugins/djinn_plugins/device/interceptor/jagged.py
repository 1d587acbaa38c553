"""Jagged nested tensors whose values are remote: attention, sequence by sequence, and padding.

They consist of ordinary tensors, so other operations on them need nothing here. PyTorch computes these by nested
tensors of another layout, or by special kernels, and a server has neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from djinn.kinds.interceptor import Handler
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.imports import follow_imports

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("HANDLERS", "install")

aten = torch.ops.aten
_OPERATIONS = "torch.nested._internal.ops"
_RANK, _RAGGED = 4, 2
"""Of operands of attention, ``[batch, heads, sequence, features]``: how many dimensions they have, and which is ragged.
"""


def install() -> None:
    """Replace attention of jagged tensors once PyTorch has imported it."""
    follow_imports((_OPERATIONS,), _replace)


def _replace(module: ModuleType) -> None:
    operations: Any = module
    operations.jagged_scaled_dot_product_attention = _attention(operations.jagged_scaled_dot_product_attention)


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               scale: float | None = None, enable_gqa: bool = False) -> Any:
        if attn_mask is None and not enable_gqa and all(map(_has_remote_sequences, (query, key, value))):
            return _attend(query, key, value, dropout_p, is_causal, scale)
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attend


def _has_remote_sequences(tensor: Any) -> bool:
    return (tensor.is_nested and tensor.layout is torch.jagged and tensor.dim() == _RANK
            and tensor._ragged_idx == _RAGGED and tensor.lengths() is None and type(tensor._values) is LazyTensor)


def _attend(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    from torch.nested._internal import sdpa
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    query, key, value, _ = sdpa._autocast(query, key, value, None)
    sdpa._validate_sdpa_input(query, key, value, None, dropout_p, is_causal, scale)
    made = [aten._scaled_dot_product_attention_math(*sequences, None, dropout_p, is_causal, scale=scale)[0]
            for sequences in zip(*map(_sequences, (query, key, value)), strict=True)]
    values = torch.cat(made, _RAGGED - 1).transpose(0, _RAGGED - 1).contiguous()
    return nested_view_from_values_offsets_lengths(
        values, query.offsets(), None, min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen,
    ).transpose(1, _RAGGED)


def _sequences(tensor: Any) -> Any:
    """Split ``[heads, all, features]`` by sequences; their lengths are a wait, unless the client knows them."""
    return tensor.values().split(tensor.offsets().diff().tolist(), _RAGGED - 1)


def _positions(offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of a jagged tensor's values: to which sequence it belongs, and where in it."""
    rows = torch.arange(total, device=offsets.device)
    sequences = torch.searchsorted(offsets[1:], rows, right=True)
    return sequences, rows - offsets[sequences]


def pad(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write the sequences into a dense tensor; elements beyond its length are dropped."""
    values, (offsets,), (length,), *padding = args
    filling = padding[0] if padding else kwargs.get("padding_value", 0.0)
    sequences, places = _positions(offsets, len(values))
    # One sequence and one place more take the dropped elements.
    made = values.new_full((len(offsets), length + 1, *values.shape[1:]), filling)
    made[sequences, places.clamp(max=length)] = values
    return made[:-1, :length].contiguous()


def unpad(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the sequences from a dense tensor."""
    dense, (offsets,), *total = args
    count = total[0] if total else kwargs.get("total_L")
    sequences, places = _positions(offsets, int(offsets[-1]) if count is None else count)
    return dense[sequences, places]


HANDLERS: Mapping[torch._ops.OpOverload, Handler] = {
    aten._jagged_to_padded_dense_forward.default: pad,
    aten._padded_dense_to_jagged_forward.default: unpad,
}
