"""Where meta kernels are known to be wrong: then nobody answers, and the executor is asked once per metadata.

Each rule was found by comparing with eager on the CPU (``shapes.equals_eager``, ``shapes.wrong_calls_unanswered``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Rule = Callable[[Sequence[torch.Tensor]], bool]
"""Says whether the meta kernel can be believed for these tensor arguments."""

_INDEX_DTYPES = (torch.int32, torch.int64)


def is_believable(name: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the meta kernel of an overload can be believed for these arguments."""
    base = name.partition("::")[2].partition(".")[0]
    rule = _RULES.get(base.rstrip("_"))
    return rule is None or rule(tensors)


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


def _real_parts(tensors: Sequence[torch.Tensor]) -> bool:
    return _same_dtype(tensors) and tensors[0].dtype in (torch.float16, torch.float32, torch.float64)


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("native_batch_norm", "_embedding_bag", "embedding_bag", "_linalg_svd", "linalg_svd", "svd",
                     "linalg_eig", "_linalg_eigh", "linalg_eigh"), _never),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "matmul", "linear"),
                    _same_dtype),
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _integers),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_layer_norm_backward",
                     "native_group_norm_backward"), _full_precision),
    "index_select": _last_is_index,
    "complex": _real_parts,
}
