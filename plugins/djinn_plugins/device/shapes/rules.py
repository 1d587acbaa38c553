"""Cases where meta kernels are known to be wrong; inference then gives no answer, and the executor is asked once.

Each rule was found by comparing with eager on the CPU (``shapes.equals_eager``, ``shapes.wrong_calls_unanswered``). The
executor is asked once per metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from djinn.ir.schema import ReturnKind, SchemaFacts
from djinn_plugins.common.operators.operators import LAYER_OPERATORS
from djinn_plugins.common.operators.stored_models import STORED_TENSOR
from djinn_plugins.device.shapes.layouts import CONTIGUOUS, ELEMENTWISE, is_canonical

Rule = Callable[[Sequence[torch.Tensor]], bool]
"""Whether the meta kernel is reliable for these tensor arguments."""

_WRONG_ON_META = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update "
    "_embedding_bag _embedding_bag_forward_only embedding_bag _linalg_svd linalg_svd svd linalg_eig _linalg_eigh "
    "linalg_eigh scaled_dot_product_attention _fft_r2c _fft_c2r _fft_c2c multilabel_margin_loss_forward "
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward nonzero_static nansum"
).split()
_KEEP_OUT = ("aten::arange.out aten::arange.start_out aten::range.out aten::range.out_ aten::linspace.out "
             "aten::logspace.out").split()
"""Factories that do not resize ``out`` if it has as many elements as they make; meta resizes it."""
_LAYOUT_KNOWN = ELEMENTWISE | CONTIGUOUS | frozenset(
    "sum mean amax amin argmax argmin softmax log_softmax cat stack clone _to_copy mm bmm addmm baddbmm matmul linear "
    "mv dot embedding index_select layer_norm empty_like zeros_like ones_like "
    "full_like rand_like randn_like new_empty new_zeros new_ones new_full new_empty_strided isfinite isinf "
    "_scaled_dot_product_flash_attention_for_cpu native_dropout_backward".split()
)
"""Operators whose results are laid out as on meta, however their operands lie in memory."""
_ONES_KNOWN = frozenset(
    "gather scatter scatter_add index_add index_fill index_copy index_put constant_pad_nd slice_backward "
    "select_backward diag_embed diagonal_backward avg_pool2d avg_pool2d_backward max_pool2d_with_indices take put "
    "masked_scatter cumsum cumprod prod any all isin expand_copy squeeze_copy unsqueeze_copy".split())
"""Operators whose results do not depend on the strides of dimensions with one element, if operands are contiguous."""
_ORDER_KNOWN = frozenset(("isin",))
"""Operators whose results are contiguous, and are laid out on meta in the order of their operands' strides."""
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NUMBERS = _FLOATS | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MADE = {
    **dict.fromkeys("rand rand_like randn randn_like normal bartlett_window blackman_window hamming_window hann_window "
                    "kaiser_window fft_fftfreq fft_rfftfreq".split(), _FLOATS),
    **dict.fromkeys("arange range linspace logspace randint randint_like randperm".split(), _NUMBERS),
    **dict.fromkeys("full full_like new_full".split(), _NUMBERS | {torch.bool}),
}
"""Factories that do not support every dtype, and dtypes that they support everywhere; for others, the executor
decides."""
_MASKS_ITS_INPUT = frozenset(("aten::native_batch_norm_backward", "aten::batch_norm_backward"))
"""Backward passes that make the gradient of their input on meta though it was not asked for."""
_NOT_OF_BOOLS = frozenset(("cumsum", "cumprod"))
"""Operators that eager refuses to compute in bool."""
_NO_BOOLS = frozenset(("sub", "rsub", "_foreach_sub", "pow"))
"""Operators that eager refuses for bools, or whose result has another dtype then."""
_COMPLEX_TOO = frozenset(
    "add sub mul div neg clone copy _to_copy fill zero sum mean mm bmm view_as_real view_as_complex".split())
"""Operators that support complex numbers wherever meta does; meta supports them for some that no device does."""
_OF_ELEMENTS = frozenset("max min amax amin argmax argmin aminmax median mode kthvalue topk sort softmax log_softmax "
                         "_softmax _log_softmax cummax cummin".split())
"""Operators that eager refuses for some empty tensors and for some dtypes, and meta does not."""
_SUMMED = frozenset(("sum", "prod", "mean", "nansum"))
"""Reductions that meta lays out differently if there is nothing to reduce."""
_INDEX_DTYPES = (torch.int32, torch.int64)


def is_believable(facts: SchemaFacts, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the meta kernel of an overload is reliable for these arguments.

    Views, in-place writes and contiguous arguments leave a kernel no choice. For other arguments the kernel chooses the
    layout of a new result; only operators whose choice is known to be the same on meta are considered reliable.
    """
    base = _base_of(facts)
    rule = _RULES.get(facts.name) or _RULES.get(base.rstrip("_"))
    if rule is not None:
        return rule(tensors)
    if base.rstrip("_") in _NO_BOOLS and not _no_bools(tensors):
        return False
    is_view = all(facts.aliases) and ReturnKind.WRITTEN not in facts.returns
    if not is_view and base.rstrip("_") not in _COMPLEX_TOO and any(tensor.dtype.is_complex for tensor in tensors):
        return False
    dtypes = _FLOATS if "softmax" in base else _NUMBERS
    if base in _OF_ELEMENTS and not all(tensor.numel() and tensor.dtype in dtypes for tensor in tensors):
        return False
    if all(kind is ReturnKind.WRITTEN or alias for kind, alias in zip(facts.returns, facts.aliases, strict=True)):
        return True
    if base in _SUMMED and not all(tensor.numel() for tensor in tensors):
        return False
    if all(map(is_canonical, tensors)) or (base in _ONES_KNOWN and _all_contiguous(tensors)):
        return True
    if base in _ORDER_KNOWN and all(map(_is_in_order, tensors)):
        return True
    # The CPU converts halves, and operands with different dtypes; a copy of an overlapping one has another layout.
    return base in _LAYOUT_KNOWN and (all(map(_is_dense, tensors)) or (
        _same_dtype(tensors) and not any(map(_is_repeated_half, tensors))))


def absent_results(facts: SchemaFacts, named: Mapping[str, Any]) -> Sequence[int]:
    """Return the positions of results that are ``None`` on devices, for which meta makes tensors."""
    if facts.name in _MASKS_ITS_INPUT and not named["output_mask"][0]:
        return (0,)
    if facts.name == "aten::_native_multi_head_attention" and not named.get("need_weights", True):
        return (1,)
    return ()


def _base_of(facts: SchemaFacts) -> str:
    return facts.name.partition("::")[2].partition(".")[0]


def _is_repeated_half(tensor: torch.Tensor) -> bool:
    reach = sum((extent - 1) * step for extent, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.dtype in (torch.float16, torch.bfloat16) and tensor.numel() > reach + 1


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether no dimension has a larger stride than the one before."""
    return all(before >= after for before, after in pairwise(tensor.stride()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its range of memory, each location once."""
    length = 1
    for step, extent in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if extent > 1 and step != length:
            return False
        length *= extent
    return True


def is_ordinary(facts: SchemaFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator supports the requested dtype; meta supports any, for any number."""
    base = _base_of(facts)
    if base.rstrip("_") in _NOT_OF_BOOLS and kwargs.get("dtype") is torch.bool:
        return False
    allowed = _MADE.get(base)
    tensors = (item for item in (*args, kwargs.get("out")) if isinstance(item, torch.Tensor))
    dtype = kwargs.get("dtype") or next((tensor.dtype for tensor in tensors), None)
    if allowed is None or dtype is None:
        return True
    if "full" not in base:
        return dtype in allowed
    return dtype in allowed and "out" not in kwargs and _holds(dtype, args[2 if base == "new_full" else 1])


def _holds(dtype: torch.dtype, number: Any) -> bool:
    if isinstance(number, (torch.Tensor, complex)):
        return False
    if dtype.is_floating_point or dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)


def has_dimensions(facts: SchemaFacts, named: Mapping[str, Any]) -> bool:
    """Whether the dimension that an operator works along, or that its indices refer to, exists."""
    tensor, dim, indices = named.get("self"), named.get("dim"), named.get("indices")
    if not isinstance(tensor, torch.Tensor):
        return True
    if isinstance(indices, (list, tuple)):
        return sum(map(_indexed_by, indices)) <= tensor.dim()
    if _base_of(facts) not in _OF_ELEMENTS:
        return True
    rank = max(tensor.dim(), 1)
    return not isinstance(dim, int) or -rank <= dim < rank


def _indexed_by(index: torch.Tensor | None) -> int:
    return index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1


def _always(tensors: Sequence[torch.Tensor]) -> bool:
    return True


def _never(tensors: Sequence[torch.Tensor]) -> bool:
    return False


def _same_dtype(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) <= 1


def _same_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    return _same_dtype(tensors) and _no_bools(tensors)


def _no_bools(tensors: Sequence[torch.Tensor]) -> bool:
    """Meta subtracts and multiplies them."""
    return not any(tensor.dtype is torch.bool for tensor in tensors)


def _convolution(tensors: Sequence[torch.Tensor]) -> bool:
    """The layout of the result follows the input's or the weight's, by rules of the library that computes it."""
    return _same_dtype(tensors) and all(
        is_canonical(tensor) and not (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        for tensor in tensors[:2]
    )


def _integers(tensors: Sequence[torch.Tensor]) -> bool:
    return not any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)


def _last_is_index(tensors: Sequence[torch.Tensor]) -> bool:
    source, index, *out = tensors
    return index.dtype in _INDEX_DTYPES and index.dim() <= 1 and all(tensor.dtype is source.dtype for tensor in out)


def _same_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Kernels accept gradients of another size without checking."""
    return len({tensor.shape for tensor in tensors}) == 1 and all(
        tensor.numel() and tensor.dtype in _FLOATS for tensor in tensors) and (
        all(map(_is_dense, tensors)) or (_same_dtype(tensors) and not any(map(_is_repeated_half, tensors))))


def _canonical(tensors: Sequence[torch.Tensor]) -> bool:
    """Some kernels propagate the stride of a dimension with one element, some do not."""
    return all(tensor.numel() and is_canonical(tensor) for tensor in tensors)


def _same_dtype_canonical(tensors: Sequence[torch.Tensor]) -> bool:
    return _same_dtype(tensors) and _canonical(tensors)


def _group_norm(tensors: Sequence[torch.Tensor]) -> bool:
    """Kernels require an input that is contiguous in some memory format."""
    return _full_precision(tensors) and tensors[0].is_contiguous()


def _full_precision(tensors: Sequence[torch.Tensor]) -> bool:
    """For halves, the CPU keeps statistics in the input's dtype, whereas meta infers float32."""
    return all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors)


def _all_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _plain_and_full_precision(tensors: Sequence[torch.Tensor]) -> bool:
    return _full_precision(tensors) and _canonical(tensors)


def _not_empty(tensors: Sequence[torch.Tensor]) -> bool:
    """For empty inputs, the CPU returns a mask of another dtype, and pixels keep their size."""
    return tensors[0].numel() > 0 and is_canonical(tensors[0])


def _real_parts(tensors: Sequence[torch.Tensor]) -> bool:
    return _same_dtype(tensors) and tensors[0].dtype in (torch.float16, torch.float32, torch.float64) and (
        _all_contiguous(tensors))


def _added_to_product(tensors: Sequence[torch.Tensor], *, in_place: bool = False, sums: int = 0) -> bool:
    """Meta also broadcasts the product to the summand; elsewhere only the summand is broadcast."""
    first, left, right = tensors[:3]
    size = (*left.shape[sums:-1], *right.shape[left.dim() - 1 :])
    pairs = zip(reversed(first.shape), reversed(size), strict=False)
    fits = first.dim() <= len(size) and all(mine in (1, theirs) for mine, theirs in pairs)
    return _same_numbers(tensors) and fits and (not in_place or first.shape == size)


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*_WRONG_ON_META, *_KEEP_OUT), _never),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "matmul", "linear"),
                    _same_numbers),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _added_to_product),
    **{f"aten::{name}_": partial(_added_to_product, in_place=True) for name in ("addmm", "addmv", "baddbmm")},
    "addbmm": partial(_added_to_product, sums=1),
    "aten::addbmm_": partial(_added_to_product, in_place=True, sums=1),
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
                     "bitwise_right_shift", "lcm", "gcd"), _integers),
    "native_layer_norm": _full_precision,
    "native_group_norm": _group_norm,
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), _plain_and_full_precision),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _same_shape),
    **dict.fromkeys(("isfinite", "isinf", "convolution_backward", "nll_loss2d_backward", "replication_pad2d_backward",
                     "replication_pad3d_backward"), _canonical),
    "threshold_backward": _same_dtype,
    "huber_loss": _same_dtype_canonical,
    "aten::pow.Scalar": _all_contiguous,
    # Their destination gets the layout of their argument.
    **dict.fromkeys(("aten::replication_pad2d.out", "aten::replication_pad3d.out"), _all_contiguous),
    # The lengths of their result lists cannot be determined otherwise.
    **dict.fromkeys(("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy",
                     "unbind_copy"), _always),
    **dict.fromkeys((*LAYER_OPERATORS, STORED_TENSOR), _always),
    "index_select": _last_is_index,
    "complex": _real_parts,
    **dict.fromkeys(("native_dropout", "pixel_shuffle", "pixel_unshuffle"), _not_empty),
}
