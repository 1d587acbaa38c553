"""Where meta kernels are known to be wrong: then nobody answers, and the executor is asked once per metadata.

Each rule was found by comparing with eager on the CPU (``shapes.equals_eager``, ``shapes.wrong_calls_unanswered``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from djinn.model.schema import ReturnKind, SchemaFacts

Rule = Callable[[Sequence[torch.Tensor]], bool]
"""Says whether the meta kernel can be believed for these tensor arguments."""

_WRONG_ON_META = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
    "_embedding_bag _embedding_bag_forward_only embedding_bag _linalg_svd linalg_svd svd linalg_eig _linalg_eigh "
    "linalg_eigh scaled_dot_product_attention _fft_r2c _fft_c2r _fft_c2c"
).split()
_LAYOUT_KNOWN = frozenset(
    "add sub rsub mul reciprocal neg abs exp log sqrt rsqrt sin cos tanh sigmoid relu gelu silu erf pow square where "
    "eq ne lt le gt ge logical_not bitwise_not clamp lerp addcmul addcdiv masked_fill sum mean amax amin argmax argmin "
    "softmax log_softmax _softmax _log_softmax cat stack clone _to_copy mm bmm addmm baddbmm matmul linear mv dot "
    "embedding index_select native_layer_norm layer_norm empty_like zeros_like ones_like "
    "full_like rand_like randn_like new_empty new_zeros new_ones new_full new_empty_strided isfinite isnan isinf "
    "_scaled_dot_product_flash_attention_for_cpu tanh_backward gelu_backward sigmoid_backward threshold_backward "
    "silu_backward _softmax_backward_data _log_softmax_backward_data native_dropout_backward".split()
)
_INDEX_DTYPES = (torch.int32, torch.int64)


def is_believable(facts: SchemaFacts, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the meta kernel of an overload can be believed for these arguments.

    Views, writes in place and contiguous arguments leave a kernel no choice. For other arguments the layout of a new
    result is the kernel's own decision; only operators that are known to decide on meta as elsewhere are believed.
    """
    base = facts.name.partition("::")[2].partition(".")[0]
    rule = _RULES.get(facts.name) or _RULES.get(base.rstrip("_"))
    if rule is not None:
        return rule(tensors)
    if all(kind is ReturnKind.WRITTEN or alias for kind, alias in zip(facts.returns, facts.aliases, strict=True)):
        return True
    return base in _LAYOUT_KNOWN or all(tensor.is_contiguous() for tensor in tensors)


def _never(tensors: Sequence[torch.Tensor]) -> bool:
    return False


def _same_dtype(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) <= 1


def _convolution(tensors: Sequence[torch.Tensor]) -> bool:
    """The layout of the result follows the input's or the weight's, by rules of the library that computes it."""
    return _same_dtype(tensors) and all(
        tensor.is_contiguous() and not (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        for tensor in tensors[:2]
    )


def _integers(tensors: Sequence[torch.Tensor]) -> bool:
    return not any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)


def _last_is_index(tensors: Sequence[torch.Tensor]) -> bool:
    return tensors[1].dtype in _INDEX_DTYPES and tensors[1].dim() <= 1


def _full_precision(tensors: Sequence[torch.Tensor]) -> bool:
    """For halves, the CPU keeps statistics in the input's dtype and meta says float32."""
    return all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)


def _not_empty(tensors: Sequence[torch.Tensor]) -> bool:
    """For nothing at all, the CPU gives a mask of another dtype."""
    return tensors[0].numel() > 0 and tensors[0].is_contiguous()


def _real_parts(tensors: Sequence[torch.Tensor]) -> bool:
    return _same_dtype(tensors) and tensors[0].dtype in (torch.float16, torch.float32, torch.float64)


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_WRONG_ON_META, _never),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "matmul", "linear"),
                    _same_dtype),
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _integers),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_layer_norm_backward",
                     "native_group_norm_backward"), _full_precision),
    "index_select": _last_is_index,
    "complex": _real_parts,
    "native_dropout": _not_empty,
}
