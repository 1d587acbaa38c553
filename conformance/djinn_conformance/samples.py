"""Single calls for shape inference: operators of models, of linear algebra, and tricky ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch
from hypothesis import example

from djinn_conformance.oracle import copied, perform, seeded
from djinn_conformance.programs import RecordedCall, Recording, Ref
from djinn_conformance.strategies import filled
from djinn_plugins.common.operators.operators import operator_named

__all__ = (
    "CHANGING_ARGUMENTS",
    "DATA_DEPENDENT",
    "DISAGREEING",
    "MODELS",
    "PLAIN_RESULTS",
    "SIZED_BY_FLOATS",
    "WRONG",
    "on_examples",
    "sample",
)

Test = TypeVar("Test", bound=Callable[..., Any])
_CPU = torch.device("cpu")


def sample(name: str, *args: Any, **kwargs: Any) -> Recording:
    """Record a call on tensors. If PyTorch refuses it, it is recorded as if it had one result."""
    inputs: list[torch.Tensor] = []

    def take(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            inputs.append(item)
            return Ref(-len(inputs))
        return [take(member) for member in item] if isinstance(item, (list, tuple)) else item

    made = RecordedCall(operator_named(f"aten::{name}"), tuple(map(take, args)),
                        {k: take(v) for k, v in kwargs.items()}, 1)
    values = {-1 - index: copied(tensor, _CPU) for index, tensor in enumerate(inputs)}
    try:
        with torch.no_grad(), seeded(_CPU, 0):
            made = attrs.evolve(made, results=len(perform(made, values, _CPU)))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        pass  # An invalid call; its test expects the refusal.
    return Recording(tuple(inputs), (made,))


def on_examples(*recordings: Recording) -> Callable[[Test], Test]:
    """Run a Hypothesis test on each of these recordings too."""

    def decorate(test: Test) -> Test:
        for recording in recordings:
            test = example(recording=recording)(test)
        return test

    return decorate


def _f(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return filled(size, dtype, sum(size))


def _i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


_SQUARE = _f(3, 3) + 5 * torch.eye(3)
_SPD = _SQUARE @ _SQUARE.mT
_IMAGE, _KERNEL = _f(2, 4, 6, 6), _f(8, 4, 3, 3)
_HEADS = _f(1, 2, 5, 4)
_LSTM = [_f(16, 3), _f(16, 4), _f(16), _f(16)]

MODELS: tuple[Recording, ...] = (
    sample("convolution", _IMAGE, _KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    sample("convolution", _last(_IMAGE), _KERNEL, _f(8), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    sample("convolution", _f(1, 4, 7), _f(4, 2, 3), None, [2], [1], [1], True, [1], 1),
    sample("conv2d", _IMAGE, _KERNEL, _f(8)),
    sample("max_pool2d_with_indices", _IMAGE, [2, 2]),
    sample("max_pool2d_with_indices", _last(_IMAGE), [3, 3], [2, 2], [1, 1]),
    sample("avg_pool2d", _last(_IMAGE), [2, 2]),
    sample("_adaptive_avg_pool2d", _last(_IMAGE), [1, 1]),
    sample("native_batch_norm", _last(_IMAGE), _f(4), _f(4), _f(4), _f(4), True, 0.1, 1e-5),
    sample("native_batch_norm", _IMAGE, None, None, _f(4), _f(4), False, 0.1, 1e-5),
    sample("native_group_norm", _IMAGE, _f(4), _f(4), 2, 4, 36, 2, 1e-5),
    sample("native_layer_norm", _f(2, 5, 4), [4], _f(4), None, 1e-5),
    sample("rms_norm", _f(2, 5, 4), [4], _f(4)),
    sample("upsample_nearest2d", _last(_IMAGE), [12, 12]),
    sample("upsample_bilinear2d", _IMAGE, [9, 9], False),
    sample("pixel_shuffle", _IMAGE, 2),
    sample("constant_pad_nd", _last(_IMAGE), [1, 1], 0.5),
    sample("reflection_pad2d", _IMAGE, [1, 1, 1, 1]),
    sample("grid_sampler_2d", _IMAGE, _f(2, 5, 5, 2), 0, 0, False),
    sample("scaled_dot_product_attention", _HEADS, _HEADS, _HEADS, None, 0.0, True),
    sample("_scaled_dot_product_flash_attention_for_cpu", _HEADS, _HEADS, _HEADS),
    sample("scaled_dot_product_attention", _HEADS, _HEADS.transpose(1, 2).contiguous().transpose(1, 2), _HEADS),
    sample("_softmax", _HEADS.transpose(2, 3), -1, False),
    sample("_log_softmax", _f(3, 4), 1, False),
    sample("nll_loss_forward", _f(3, 4), _i(0, 1, 3), None, 1, -100),
    sample("cross_entropy_loss", _f(3, 4), _i(0, 1, 3)),
    sample("embedding", _f(10, 4), _i(1, 2, 3)),
    sample("_embedding_bag", _f(10, 4), _i(1, 2, 4, 5), _i(0, 2)),
    sample("lstm.input", _f(5, 2, 3), [_f(1, 2, 4), _f(1, 2, 4)], _LSTM, True, 1, 0.0, False, False, False),
    sample("native_dropout", _f(3, 4), 0.5, True),
    sample("gelu", _f(3, 4).t()),
    sample("linear", _f(2, 5, 4), _f(3, 4), _f(3)),
    sample("linear", _f(2, 5, 4).transpose(0, 1), _f(3, 4)),
    sample("matmul", _f(2, 5, 4), _f(4, 3)),
    sample("bmm", _f(2, 4, 5).transpose(1, 2), _f(2, 4, 3)),
    sample("einsum", "bij,bjk->bki", [_f(2, 3, 4), _f(2, 4, 5)]),
    sample("cat", [_last(_IMAGE), _last(_IMAGE)], 1),
    sample("cat", [_f(0), _f(2, 3)], 0),
    sample("stack", [_f(2, 3).t(), _f(2, 3).t()], -1),
    sample("where.self", _f(2, 1) > 0, _f(1, 3), _f(2, 3, dtype=torch.float64)),
    sample("add.Tensor", _f(2, 3).t(), _f(2, 3).t()),
    sample("add.Tensor", _last(_IMAGE), _f(4, 1, 1)),
    sample("add.Tensor", _f(3, dtype=torch.float16), _f(2, 3, dtype=torch.int64)),
    sample("div.Tensor", _i(1, 2), _i(3, 4)),
    sample("mul.Scalar", _i(1, 2), 0.5),
    sample("pow.Scalar", 2, _f(3)),
    sample("clone", _last(_IMAGE)),
    sample("clone", _f(2, 3).t(), memory_format=torch.contiguous_format),
    sample("clone", _f(1, 3).expand(2, 3)),
    sample("_to_copy", _f(2, 3).t(), dtype=torch.float64),
    sample("empty_like", _f(2, 3, 4).permute(2, 0, 1)),
    sample("new_empty_strided", _f(2), [2, 3], [1, 2]),
    sample("sum.dim_IntList", _f(2, 3, 4), None, True, dtype=torch.float64),
    sample("sum", _i(1, 2).to(torch.int32)),
    sample("var_mean.correction", _f(2, 3, 4), [0, 2], correction=1, keepdim=True),
    sample("sort.stable", _f(3, 4).t(), stable=True, dim=0),
    sample("topk", _f(3, 4).t(), 2, 0),
    sample("kthvalue", _f(3, 4), 2),
    sample("median.dim", _f(3, 4), 1),
    sample("cummax", _f(3, 4).t(), 0),
    sample("searchsorted.Tensor", _i(1, 3, 5), _f(2, 2)),
    sample("histc", _f(9), 5),
    sample("bincount", _i(1, 2, 2), None, 5),
    sample("cdist", _f(3, 4), _f(5, 4)),
    sample("roll", _f(2, 3).t(), [1], [0]),
    sample("flip", _f(2, 3).t(), [0]),
    sample("repeat", _f(2, 3).t(), [2, 1]),
    sample("index.Tensor", _f(4, 3), [_i(0, 2), None]),
    sample("index.Tensor", _f(2, 4, 3), [None, _i(0, 2)]),
    sample("index.Tensor", _f(2, 4, 3, 2), [_i(0, 1), None, _i(0, 2)]),
    sample("index_put", _f(4, 3), [_i(0, 2)], _f(3), True),
    sample("scatter_add", _f(4), 0, _i(0, 0, 1), _f(3)),
    sample("scatter_reduce.two", _f(4), 0, _i(0, 0, 1), _f(3), "amax"),
    sample("repeat_interleave.Tensor", _i(1, 2), output_size=3),
    sample("linalg_qr", _f(4, 3)),
    sample("_linalg_svd", _f(4, 3), True),
    sample("_linalg_svd", _f(4, 3), False, False),
    sample("linalg_cholesky_ex", _SPD),
    sample("linalg_inv_ex", _SQUARE),
    sample("linalg_lu_factor_ex", _SQUARE),
    sample("_linalg_solve_ex", _SQUARE, _f(3, 2)),
    sample("_linalg_eigh", _SPD),
    sample("linalg_eig", _SQUARE),
    sample("_linalg_det", _SQUARE),
    sample("linalg_lstsq", _f(4, 3), _f(4, 2)),
    sample("linalg_solve_triangular", _SQUARE, _f(3, 2), upper=True),
    sample("_fft_r2c", _f(4, 6), [1], 0, True),
    sample("_fft_r2c", _f(4, 6), [0], 0, False),
    sample("_fft_c2c", _f(4, 6, dtype=torch.complex64), [0, 1], 0, True),
    sample("_fft_c2r", _f(4, 4, dtype=torch.complex64), [1], 0, 6),
    sample("view_as_real", _f(2, 3, dtype=torch.complex64)),
    sample("view.dtype", _f(2, 4), torch.int16),
    sample("unfold", _f(6), 0, 3, 2),
    sample("as_strided", _f(12)[2:], [2, 2], [3, 1]),
    sample("slice.Tensor", _f(4, 6), 1, 1, None, 2),
    sample("select.int", _f(4, 6), 0, -1),
    sample("split_with_sizes", _f(6, 2), [1, 2, 3]),
    sample("unbind.int", _f(2, 3, 4), 1),
    sample("expand", _f(2, 1), [3, 2, 4]),
    sample("native_layer_norm_backward", _f(2, 4), _f(2, 4), [4], _f(2, 1), _f(2, 1), None, None, [True, False, False]),
    sample("convolution_backward", _f(2, 8, 4, 4), _IMAGE, _KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
           [True, True, False]),
    sample("native_batch_norm_backward", _IMAGE, _IMAGE, None, None, None, _f(4), _f(4), True, 1e-5,
           [True, False, False]),
    sample("native_batch_norm_backward", _IMAGE, _IMAGE, _f(4), None, None, _f(4), _f(4), True, 1e-5,
           [False, True, False]),
    sample("_native_multi_head_attention", *[_f(2, 3, 4)] * 3, 4, 2, _f(12, 4), _f(12), _f(4, 4), _f(4), None, False),
    sample("_foreach_add.List", [_f(2), _f(3, 1)], [_f(2), _f(3, 1)]),
    sample("_foreach_norm.Scalar", [_f(2), _f(3)], 2),
    sample("_fused_adamw_", [_f(3)], [_f(3)], [_f(3)], [_f(3).abs()], [], [torch.tensor(1.0)], lr=0.1, beta1=0.9,
           beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False),
    sample("arange", 5, device=_CPU),
    sample("arange.start_step", 0, 1, 0.25, device=_CPU),
    sample("linspace", 0, 1, 5, device=_CPU),
    sample("full", [2, 3], True, device=_CPU),
    sample("randperm", 5, device=_CPU),
    sample("tril_indices", 3, 3, 0, device=_CPU),
)
"""Calls whose results can be inferred, including some where meta kernels and real ones are known to disagree."""

_CROSSED = (_f(4, 6), _f(6, 4).t())
"""Two tensors of equal size with opposite dimension orders in memory."""
_DEEP = _f(2, 3, 4, 6).transpose(1, 3)
_TRANSPOSED_HEADS = _f(2, 5, 3, 4).transpose(1, 2)
"""Attention heads as transformers create them: a projection viewed as several heads."""

DISAGREEING: tuple[Recording, ...] = (
    *(sample(name, *_CROSSED) for name in (
        "copysign.Tensor", "floor_divide", "ldexp.Tensor", "logaddexp", "logical_and", "logical_or", "logical_xor",
        "heaviside", "atan2", "fmod.Tensor", "remainder.Tensor", "hypot", "nextafter", "maximum")),
    sample("div.Tensor_mode", *_CROSSED, rounding_mode="floor"),
    sample("div.Tensor_mode", *_CROSSED[::-1], rounding_mode="trunc"),
    sample("normal.Tensor_Tensor", *(tensor.abs() for tensor in _CROSSED)),
    sample("native_dropout", _f(0, 3), 0.5, True),
    *(sample("scaled_dot_product_attention", query, key, key)
      for query in (_TRANSPOSED_HEADS, _f(2, 3, 5, 4), _f(3, 2, 5, 4).transpose(0, 1), _f(2, 3, 4, 5).mT)
      for key in (_TRANSPOSED_HEADS, _f(2, 3, 7, 4))),
    sample("scaled_dot_product_attention", *[_TRANSPOSED_HEADS] * 3, torch.ones(5, 5, dtype=torch.bool)),
    sample("scaled_dot_product_attention", *[_TRANSPOSED_HEADS] * 3, None, 0.0, True),
    sample("one_hot", torch.zeros(3, 2, dtype=torch.int64).t(), 4),
    sample("angle", _f(4, 6, dtype=torch.complex64).t()),
    sample("log_sigmoid_forward", _f(6, 4).t()),
    sample("_native_batch_norm_legit", _f(3, 5, 4).transpose(1, 2), _f(4), _f(4), _f(4), _f(4), True, 0.1, 1e-5),
    sample("_native_batch_norm_legit", _IMAGE, None, None, _f(4), _f(4), False, 0.1, 1e-5),
    sample("_native_batch_norm_legit.no_stats", _f(1, 4, 3).transpose(1, 2), None, None, True, 0.1, 1e-5),
    sample("_batch_norm_with_update", _f(3, 5, 4).transpose(1, 2), _f(4), _f(4), _f(4), _f(4), 0.1, 1e-5),
    sample("native_layer_norm", _f(2, 5, 4, dtype=torch.bfloat16), [4], None, None, 1e-5),
    sample("reflection_pad2d", _last(_IMAGE), [1, 1, 1, 1]),
    sample("replication_pad2d", _last(_IMAGE), [1, 1, 1, 1]),
    sample("reflection_pad3d", _f(1, 2, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d), [1] * 6),
    sample("replication_pad3d", _f(1, 2, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d), [1] * 6),
    sample("max_unpool2d", _last(_f(1, 2, 2, 2)), _last(torch.zeros(1, 2, 2, 2, dtype=torch.int64)), [4, 4]),
    sample("_embedding_bag_forward_only", _f(10, 4), _i(1, 2, 4, 5), _i(0, 2)),
    sample("pixel_shuffle", _last(_f(1, 8, 3, 3)), 2),
    sample("pixel_shuffle", _last(_f(1, 8, 3, 3)), 1),
    sample("channel_shuffle", _last(_f(1, 4, 5, 5)), 2),
    sample("_fft_c2r", _f(5, 6, 7, dtype=torch.complex64), [0], 0, 8),
    sample("_fft_r2c", _f(5, 6, 6), [0, 1, 2], 0, True),
    sample("_fft_r2c", _DEEP, [1, 2], 0, True),
    sample("_linalg_svd", _f(3, 4).t(), True),
    sample("linalg_eig", _SQUARE.t()),
    sample("convolution", _last(_IMAGE), _KERNEL, _f(8), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    sample("convolution", _f(2, 7, 4).transpose(1, 2), _f(4, 3, 3), None, [2], [2], [1], True, [1], 1),
)
"""Calls on which meta kernels and real ones disagree in PyTorch 2.13, found with its own operator samples."""

CHANGING_ARGUMENTS: tuple[Recording, ...] = (
    sample("squeeze_.dim", _f(1, 3), 0),
    sample("unsqueeze_", _f(3), 1),
    sample("t_", _f(2, 3)),
    sample("transpose_", _f(2, 3, 4), 0, 2),
    sample("swapaxes_", _f(2, 3), 0, 1),
    sample("as_strided_", _f(6), [2, 2], [1, 2]),
    sample("resize_", _f(2, 3), [4, 5]),
    sample("resize_", _f(2, 3), [2]),
    sample("resize_as_", _f(2, 3), _f(5)),
    sample("set_.source_Tensor", _f(2, 3), _f(5)),
    sample("set_", _f(2, 3)),
    sample("add.out", _f(2, 3), _f(2, 3), out=_f(0)),
    sample("mm.out", _f(2, 3), _f(3, 4), out=_f(0)),
    sample("sort.values", _f(3, 2), 0, values=_f(0), indices=torch.zeros(0, dtype=torch.int64)),
    sample("add_.Tensor", _f(2, 3).t(), _f(2)),
    sample("_foreach_zero_", [_f(2), _f(3, 2)]),
)
"""Calls that change sizes or strides of their arguments, and two that write them without such changes."""

DATA_DEPENDENT: tuple[tuple[Recording, Recording], ...] = tuple(
    (sample(name, *make(0)), sample(name, *make(1)))
    for name, make in (
        ("nonzero", lambda one: (torch.full((4,), one),)),
        ("argwhere", lambda one: (torch.full((2, 2), one),)),
        ("masked_select", lambda one: (_f(4), torch.full((4,), bool(one)))),
        ("index.Tensor", lambda one: (_f(4, 2), [torch.full((4,), bool(one))])),
        ("_unique2", lambda one: (_i(1, 1 + one, 1 + 2 * one),)),
        ("unique_dim", lambda one: (torch.stack([_i(1, 1), _i(1 + one, 1)]), 0)),
        ("unique_consecutive", lambda one: (_i(1, 1 + one, 1),)),
        ("bincount", lambda one: (_i(0, 1, 1 + 4 * one),)),
        ("repeat_interleave.Tensor", lambda one: (_i(1, 1 + one),)),
        ("repeat_interleave.self_Tensor", lambda one: (_f(2), _i(1, 1 + one))),
    )
)
"""Pairs of calls that differ only in the elements of their arguments, and in the sizes of their results."""

PLAIN_RESULTS: tuple[Recording, ...] = (
    sample("_local_scalar_dense", torch.tensor(2.5)),
    sample("item", torch.tensor(2.5)),
    sample("equal", _f(3), _f(3)),
    sample("is_nonzero", torch.tensor(1)),
    sample("allclose", _f(3), _f(3)),
    sample("is_same_size", _f(3), _f(3)),
)
"""Calls that return Python values."""

WRONG: tuple[Recording, ...] = (
    sample("mm", _f(2, 3), _f(2, 3)),
    sample("mm", _f(2, 3), _f(3, 2, dtype=torch.float64)),
    sample("mm", _f(2, 3), _f(3)),
    sample("bmm", _f(2, 3, 4), _f(3, 4, 2)),
    sample("addmm", _f(5), _f(2, 3), _f(3, 4)),
    sample("linear", _f(2, 3), _f(4, 2)),
    sample("linear", _f(2, 3), _f(4, 3, dtype=torch.float64)),
    sample("add.Tensor", _f(2, 3), _f(2)),
    sample("add_.Tensor", _f(3), _f(2, 3)),
    sample("add_.Tensor", _i(1, 2), _f(2)),
    sample("view", _f(2, 3), [4]),
    sample("view", _f(2, 3).t(), [6]),
    sample("reshape", _f(2, 3), [4, -1]),
    sample("expand", _f(2, 3), [4, 3]),
    sample("select.int", _f(2, 3), 0, 5),
    sample("transpose.int", _f(2, 3), 0, 2),
    sample("cat", [_f(2, 3), _f(2, 2)], 0),
    sample("cat", [_f(2, 3), _f(3)], 0),
    sample("stack", [_f(2), _f(3)], 0),
    sample("split_with_sizes", _f(6), [1, 2], 0),
    sample("permute", _f(2, 3), [0, 0]),
    sample("sum.dim_IntList", _f(2, 3), [2]),
    sample("mean", _i(1, 2)),
    sample("convolution", _IMAGE, _f(8, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    sample("convolution", _IMAGE, _KERNEL.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    sample("convolution", _f(2, 4, 2, 2), _KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    sample("max_pool2d_with_indices", _f(2, 4, 1, 1), [3, 3]),
    sample("native_layer_norm", _f(2, 5), [4], None, None, 1e-5),
    sample("embedding", _f(10, 4), _f(3)),
    sample("gather", _f(2, 3), 0, _f(2, 3)),
    sample("gather", _f(2, 3), 0, _i(0, 1)),
    sample("index_select", _f(2, 3), 0, _i(0).view(1, 1)),
    sample("masked_fill.Scalar", _f(3), _i(0, 1, 0), 1.0),
    sample("where.self", _f(3), _f(3), _f(3)),
    sample("scaled_dot_product_attention", _HEADS, _f(1, 2, 5, 3), _HEADS),
    sample("nll_loss_forward", _f(3, 4), _i(0, 1), None, 1, -100),
    sample("linalg_inv_ex", _f(2, 3)),
    sample("_linalg_solve_ex", _SQUARE, _f(4, 2)),
    sample("linalg_cholesky_ex", _f(2, 3)),
    sample("topk", _f(2, 3), 5),
    sample("bitwise_and.Tensor", _f(3), _f(3)),
    sample("complex", _f(3), _f(3, dtype=torch.float64)),
    sample("view_as_complex", _f(3)),
    sample("squeeze_.dim", _f(3), 4),
    sample("unfold", _f(3), 0, 5, 1),
    sample("lerp.Scalar", _f(3), _f(3, dtype=torch.float64), 0.5),
    sample("randperm", -1, device=_CPU),
    sample("arange", -1, device=_CPU),
    sample("full", [-1], 0, device=_CPU),
    sample("randperm", 129, dtype=torch.int8, device=_CPU),
    sample("index_put_", _f(5, 3), [_i(0, 1)], _f(3, 3)),
    sample("index_put_", _f(5, 3), [_i(0, 1)], _f(3, dtype=torch.float64)),
    sample("index.Tensor", _f(0, 3), [_i(0)]),
    sample("bucketize.Tensor", _f(3), _f(3, 3)),
    sample("add.Tensor", _f(3), _f(3), alpha=True),
    sample("sub.Tensor", _i(1), _i(1), alpha=1.5),
    sample("pow.Tensor_Scalar", _i(2), -2),
    sample("bernoulli_.float", _f(3), 1.5),
    sample("uniform_", _f(3), 1.0, 0.0),
    sample("exponential_", _f(3), -1.0),
    sample("cauchy_", _f(3), 0.0, -1.0),
    sample("random_.from", _f(3), 2, 1),
    sample("multinomial", _f(3), 4),
    sample("heaviside", _f(3), _f(3, dtype=torch.float64)),
)
"""Calls that eager refuses because of sizes, dtypes or numbers."""

SIZED_BY_FLOATS: tuple[tuple[Recording, Recording], ...] = (
    (sample("arange", 3.0, device=_CPU), sample("arange", 4.5, device=_CPU)),
    (sample("arange.start", 0.0, 3.0, device=_CPU), sample("arange.start", 1.5, 3.0, device=_CPU)),
    (sample("arange.start_step", 0.0, 3.0, 1.0, device=_CPU), sample("arange.start_step", 0.0, 3.0, 0.5, device=_CPU)),
    (sample("range", 0.0, 3.0, device=_CPU), sample("range", 0.0, 4.0, device=_CPU)),
    (sample("upsample_nearest2d.vec", _IMAGE, None, [2.0, 2.0]),
     sample("upsample_nearest2d.vec", _IMAGE, None, [1.5, 2.0])),
    (sample("upsample_bilinear2d.vec", _IMAGE, None, False, [2.0, 2.0]),
     sample("upsample_bilinear2d.vec", _IMAGE, None, False, [0.5, 2.0])),
    (sample("upsample_linear1d.vec", _f(1, 2, 4), None, False, [2.0]),
     sample("upsample_linear1d.vec", _f(1, 2, 4), None, False, [3.0])),
)
"""Pairs of calls that differ in a real number and in the sizes of their results."""
