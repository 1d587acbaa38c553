"""Conditions for kernels that do not check their arguments.

Each rule was found by calling CPU kernels with one argument changed, next to memory that must not be accessed. PyTorch
treats such cases as one class (its issue 195547); until they are fixed there, a server for untrusted clients has to
check the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from math import prod
from typing import Any

import torch

from djinn_plugins.guard import fused_kernels as layers
from djinn_plugins.guard.ctc import ctc_loss, ctc_loss_backward
from djinn_plugins.guard.embeddings import (
    embedding_backward,
    embedding_bag,
    embedding_bag_backward,
    embedding_bag_whole,
)
from djinn_plugins.guard.fused_kernels import Rule
from djinn_plugins.guard.preconditions import (
    Named,
    dims_exist,
    expect,
    has_elements,
    like_forward,
    numel_is,
    same_size,
    size_is,
    within,
)
from djinn_plugins.guard.quantization import QUANTIZATION

__all__ = ("RULES", "Rule")


def _batch_norm(*, trains: bool | None = None) -> Rule:
    """Rule for a forward pass; some overloads are for training only, others for inference only."""

    def rule(named: Named) -> None:
        tensor = named["input"]
        expect(tensor.dim() >= 2, f"input has {tensor.dim()} dimensions, and 2 are needed at least")
        is_training = named["training"] if trains is None else trains
        for name in ("weight", "bias", "running_mean", "running_var"):
            is_needed = not is_training and name.startswith("running")
            expect(not is_needed or named.get(name) is not None, f"{name} is missing")
            numel_is(named, name, tensor.shape[1])

    return rule


def _batch_norm_backward(named: Named) -> None:
    gradient = "grad_out" if "grad_out" in named else "grad_output"
    tensor = named["input"]
    # The kernel divides by the number of elements.
    expect(tensor.numel() > 0, "input is empty")
    expect(tensor.dim() >= 2, f"input has {tensor.dim()} dimensions, and 2 are needed at least")
    same_size(named, "input", gradient)
    variance = next(name for name in ("save_invstd", "save_var", "save_var_transform") if name in named)
    trains = named.get("train", named.get("update"))
    needed = ("save_mean", variance) if trains else ("running_mean", "running_var")
    for name in ("weight", "running_mean", "running_var", "save_mean", variance):
        numel_is(named, name, tensor.shape[1], or_empty=name.startswith("save") and name not in needed)
    for name in needed:
        expect(named[name] is not None or not tensor.numel(), f"{name} is missing")


def _layer_norm_backward(named: Named) -> None:
    tensor, inner = named["input"], len(named["normalized_shape"])
    same_size(named, "input", "grad_out")
    expect(inner <= tensor.dim(), f"{inner} of {tensor.dim()} dimensions")
    outer = prod(tensor.shape[: tensor.dim() - inner])
    for name in ("mean", "rstd"):
        numel_is(named, name, outer)
    for name in ("weight", "bias"):
        numel_is(named, name, prod(named["normalized_shape"]), or_empty=True)


def _group_norm(named: Named) -> None:
    groups, channels = named["group"], named["C"]
    expect(groups > 0 and min(named["N"], channels, named["HxW"]) >= 0 and channels % groups == 0,
           f"{channels} channels in {groups} groups")
    numel_is(named, "input", named["N"] * channels * named["HxW"])
    for name in ("weight", "bias"):
        numel_is(named, name, channels, or_empty=True)


def _group_norm_backward(named: Named) -> None:
    _group_norm(named)
    same_size(named, "input", "grad_out")
    for name in ("mean", "rstd"):
        numel_is(named, name, named["N"] * named["group"])


def _alike(*names: str) -> Rule:
    return lambda named: same_size(named, *names)


def _adaptive_pool_backward(rank: int, *, with_indices: bool) -> Rule:
    def rule(named: Named) -> None:
        gradient, tensor = named["grad_output"], named["self"]
        expect(gradient.dim() == tensor.dim() and tensor.dim() >= rank, "grad_output has other dimensions than self")
        expect(gradient.shape[:-rank] == tensor.shape[:-rank], "grad_output has other planes than self")
        expect(not gradient.numel() or tensor.numel() > 0, "a gradient for nothing")
        if with_indices:
            same_size(named, "grad_output", "indices")
            within(named, "indices", 0, prod(tensor.shape[-rank:]))

    return rule


def _pool_backward(operator: str, words: str, *, rank: int = 0) -> Rule:
    def rule(named: Named) -> None:
        with_indices = ["indices"] if "indices" in named else []
        like_forward(named, operator, "self", ["grad_output", *with_indices], words)
        if with_indices:
            within(named, "indices", 0, prod(named["self"].shape[-rank:]))

    return rule


def _fractional_pool_backward(rank: int) -> Rule:
    def rule(named: Named) -> None:
        tensor = named["self"]
        expect(tensor.dim() >= rank and len(named["output_size"]) == rank, "output_size of other dimensions than self")
        wanted = (*tensor.shape[:-rank], *named["output_size"])
        size_is(named, "grad_output", wanted)
        size_is(named, "indices", wanted)
        within(named, "indices", 0, prod(tensor.shape[-rank:]))

    return rule


def _max_pool1d(named: Named) -> None:
    tensor = named["self"]
    kernel, padding, dilation = (named[name][0] for name in ("kernel_size", "padding", "dilation"))
    expect(min(kernel, dilation) > 0 and padding >= 0, "kernel_size and dilation of at least 1, padding of at least 0")
    length = tensor.shape[-1] if tensor.dim() else 0
    expect(dilation * (kernel - 1) < length + 2 * padding, f"a kernel of {kernel} for {length} elements")


def _padding_backward(operator: str) -> Rule:
    return lambda named: like_forward(named, operator, "self", ["grad_output"], "padding")


def _grid_sampler_backward(operator: str) -> Rule:
    def rule(named: Named) -> None:
        like_forward(named, operator, "input grid", ["grad_output"], "interpolation_mode padding_mode align_corners")

    return rule


def _classes(named: Named) -> int:
    tensor = named["self"]
    expect(tensor.dim() > 0, "self has no classes")
    return int(tensor.shape[-1] if tensor.dim() == 1 else tensor.shape[1])


def _nll_backward(named: Named) -> None:
    tensor, target, classes = named["self"], named["target"], _classes(named)
    expect(target.numel() * classes == tensor.numel(), "target does not fit self")
    numel_is(named, "grad_output", target.numel() if named["reduction"] == 0 else 1)
    numel_is(named, "weight", classes)
    numel_is(named, "total_weight", 1)
    within(named, "target", 0, classes, also=named["ignore_index"])


def _multi_margin_backward(named: Named) -> None:
    gradient, target = named["grad_output"], named["target"]
    expect(gradient.numel() == (target.numel() if named["reduction"] == 0 else 1), "grad_output does not fit target")
    within(named, "target", 0, named["self"].shape[-1] if named["self"].dim() else 1)


def _multilabel_margin_backward(named: Named) -> None:
    gradient, tensor = named["grad_output"], named["self"]
    same_size(named, "self", "target", "is_target")
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    expect(gradient.numel() == (rows if named["reduction"] == 0 else 1), "grad_output does not fit self")
    within(named, "target", -1, tensor.shape[-1] if tensor.dim() else 1)


def _gradient_of(named: Named) -> str:
    """Name the argument with the gradient of distances, which is called `grad` up to PyTorch 2.13."""
    return "grad" if "grad" in named else "grad_output"


def _cdist_backward(named: Named) -> None:
    name = _gradient_of(named)
    gradient, left, right = named[name], named["x1"], named["x2"]
    same_size(named, name, "cdist")
    expect(min(left.dim(), right.dim(), gradient.dim()) >= 2 and left.shape[-1] == right.shape[-1],
           "x1 and x2 do not fit")
    expect(gradient.shape[-2:] == (left.shape[-2], right.shape[-2]), "grad does not fit x1 and x2")
    expect(gradient.shape[:-2] == torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), "grad of another batch")


def _pdist_backward(named: Named) -> None:
    tensor = named["self"]
    expect(tensor.dim() == 2 and (tensor.shape[0] > 0 or not tensor.shape[1]), "self has not 2 dimensions, or no rows")
    for name in (_gradient_of(named), "pdist"):
        numel_is(named, name, tensor.shape[0] * (tensor.shape[0] - 1) // 2)


def _pivots(data: str, pivots: str, *, symmetric: bool = False) -> Rule:
    def rule(named: Named) -> None:
        matrix, given = named[data], named[pivots]
        expect(matrix.dim() >= 2, f"{data} has not 2 dimensions")
        rows, least = matrix.shape[-2], min(matrix.shape[-2:])
        expect(given.dim() > 0 and given.shape[-1] == least and given.shape[:-1] == matrix.shape[:-2],
               f"{pivots} has the size {list(given.shape)} for {list(matrix.shape)}")
        within(named, pivots, -rows if symmetric else 1, rows + 1)
        if symmetric and has_elements(given):
            rows_of = given.reshape(-1, least).tolist() if least else ()
            expect(all(map(_come_in_pairs, rows_of)), f"{pivots} is of no factorization")

    return rule


def _come_in_pairs(pivots: list[int]) -> bool:
    """Whether no pivot is zero, and negative pivots, which stand for 2x2 blocks, come in pairs."""
    runs = [len(list(run)) for is_negative, run in groupby(pivots, lambda pivot: pivot < 0) if is_negative]
    return 0 not in pivots and all(length % 2 == 0 for length in runs)


def _transform(named: Named) -> None:
    dims_exist(named, "dim")
    # The kernel uses these numbers unchanged as positions in a list of dimensions.
    expect(min(named["dim"], default=0) >= 0, f"dim {list(named['dim'])} counted from the end")
    expect(0 <= named["normalization"] <= 2, f"normalization {named['normalization']}")
    if "out" in named:
        real, other = (item.dtype.to_complex() if item.dtype.is_floating_point else item.dtype
                       for item in (named["self"], named["out"]))
        expect(real is other, f"{named['self'].dtype} transformed to {named['out'].dtype}")
    last = named.get("last_dim_size")
    if last is not None and named["dim"]:
        expect(last > 0 and named["self"].shape[named["dim"][-1]] == last // 2 + 1, f"{last} elements of another count")


def _segments(named: Named) -> None:
    data, lengths, offsets = named["data"], named["lengths"], named["offsets"]
    given = offsets if lengths is None else lengths
    expect(given is not None and named.get("indices") is None, "neither lengths nor offsets")
    axis = named["axis"] + (data.dim() if named["axis"] < 0 else 0)
    expect(given.dim() > 0 and 0 <= axis < data.dim() and axis == given.dim() - 1, f"axis {axis}")
    expect(given.shape[:-1] == data.shape[:axis], "data does not fit its segments")
    if lengths is not None:
        within(named, "lengths", 0, data.shape[axis] + 1)
        # The kernel continues where the previous segment ends. It checks equality itself, unless `unsafe` is set.
        expect(not has_elements(lengths) or bool((lengths.sum(-1) <= data.shape[axis]).all()),
               "the lengths do not add up")
    if offsets is not None:
        within(named, "offsets", 0, data.shape[axis] + 1)
        expect(not has_elements(offsets) or bool((offsets.diff(dim=-1) >= 0).all()), "the offsets fall")


def _segments_backward(named: Named) -> None:
    _segments(named)
    same_size(named, "output", "grad")
    data, axis = named["data"], named["axis"] % named["data"].dim()
    given = named["lengths"] if named["lengths"] is not None else named["offsets"]
    segments = given.shape[-1] - (named["lengths"] is None)
    size_is(named, "output", (*data.shape[:axis], segments, *data.shape[axis + 1 :]))


def _unfold_backward(named: Named) -> None:
    sizes, size, step = list(named["input_sizes"]), named["size"], named["step"]
    if not sizes:
        size_is(named, "grad_in", (size,))
        return
    rank = len(sizes)
    expect(-rank <= named["dim"] < rank and min(sizes, default=0) >= 0, f"dim {named['dim']} of {sizes}")
    dim = named["dim"] % rank
    expect(0 <= size <= sizes[dim] and step > 0, f"windows of {size} every {step} of {sizes[dim]}")
    sizes[dim] = (sizes[dim] - size) // step + 1
    size_is(named, "grad_in", (*sizes, size))


def _weight_norm(named: Named) -> None:
    weight = named["v"] if "v" in named else named["saved_v"]
    dim, rank = named["dim"], weight.dim()
    expect(rank > 0 and dim in (0, rank - 1), f"dim {dim} of {rank} dimensions")
    # The kernel divides by it.
    expect(weight.shape[dim] > 0, f"dim {dim} is empty")
    for name in ("g", "saved_g", "saved_norms"):
        numel_is(named, name, weight.shape[dim])
    if "grad_w" in named:
        size_is(named, "grad_w", weight.shape)


def _convolution_backward(named: Named) -> None:
    """Check that the gradient fits, and that the given size of the bias, if any, is the number of channels."""
    tensor, weight, gradient = named["input"], named["weight"], named["grad_output"]
    rank = weight.dim() - 2
    expect(rank > 0 and tensor.dim() == weight.dim() == gradient.dim(), "input, weight and grad_output do not fit")
    words = [_full(named[name], rank) for name in ("stride", "padding", "dilation", "output_padding")]
    stride, padding, dilation, extra = words
    groups, spatial = named["groups"], tensor.shape[2:]
    expect(groups > 0 and min(stride) > 0 and min(dilation) > 0 and min(padding) >= 0 and min(extra) >= 0,
           "stride, dilation and groups of at least 1, padding of at least 0")
    if named["transposed"]:
        channels = weight.shape[1] * groups
        expect(weight.shape[0] == tensor.shape[1], "weight does not fit input")
        wanted = [(extent - 1) * step - 2 * pad + wide * (kernel - 1) + more + 1
                  for extent, step, pad, wide, kernel, more in zip(
                      spatial, stride, padding, dilation, weight.shape[2:], extra, strict=True)]
    else:
        channels = weight.shape[0]
        expect(weight.shape[1] * groups == tensor.shape[1], "weight does not fit input")
        wanted = [(extent + 2 * pad - wide * (kernel - 1) - 1) // step + 1 for extent, step, pad, wide, kernel
                  in zip(spatial, stride, padding, dilation, weight.shape[2:], strict=True)]
    # Without a channel of input, eager makes none of output, and gradients of zeros.
    made = channels if tensor.shape[1] else 0
    size_is(named, "grad_output", (tensor.shape[0], made, *wanted))
    bias = named["bias_sizes"]
    expect(bias is None or list(bias) in ([], [0], [channels]), f"bias_sizes {bias}")


def _convolution_double_backward(named: Named) -> None:
    """Check that the gradients fit, and the gradients of the gradients."""
    _convolution_backward({**named, "input": named["self"], "grad_output": named["gO"], "bias_sizes": None})
    for name, like in (("ggI", "self"), ("ggW", "weight")):
        size_is(named, name, named[like].shape)
    numel_is(named, "ggb", named["gO"].shape[1])


def _full(numbers: Any, rank: int) -> list[int]:
    found = [numbers] if isinstance(numbers, int) else list(numbers)
    expect(len(found) in (1, rank), f"{len(found)} numbers for {rank} dimensions")
    return found * rank if len(found) == 1 else found


def _resampled(named: Named) -> None:
    """Check that no scale leads to pixels outside the input; kernels with antialiasing use the scales."""
    tensor = named.get("self", named.get("input"))
    if tensor is None or named.get("output_size") is None or tensor.dim() != 4:
        return
    scales = named.get("scales_h"), named.get("scales_w")
    for scale, extent, wanted in zip(scales, tensor.shape[2:], named["output_size"], strict=True):
        expect(scale is None or (scale > 0 and (wanted - 0.5) / scale < extent),
               f"a scale of {scale} from {extent} to {wanted}")


def _repeats(named: Named) -> None:
    repeats = named["repeats"]
    if isinstance(repeats, torch.Tensor) and repeats.numel():
        within(named, "repeats", 0, 2**40)
        if named["output_size"] is not None and has_elements(repeats):
            expect(int(repeats.sum()) == named["output_size"], "output_size is not the sum of repeats")


def _chunks(named: Named) -> None:
    dim = named["dim"]
    expect(all(-tensor.dim() <= dim < tensor.dim() for tensor in named["tensors"]), f"dim {dim} of tensors without it")


def _power(named: Named) -> None:
    expect(abs(named["n"]) < 2**31, f"a matrix to the power of {named['n']}")


_POOL = "kernel_size stride padding"
_ADAM = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
                    _batch_norm()),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_batch_norm_no_update"), _batch_norm(trains=False)),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_update_stats"),
                    _batch_norm(trains=True)),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward", "_batch_norm_impl_index_backward"),
                    _batch_norm_backward),
    "native_layer_norm_backward": _layer_norm_backward,
    # A loop over a TensorIterator, which would stretch one of them; and a kernel of oneDNN, which reads beyond it.
    "gelu_backward": _alike("self", "grad_output"),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _alike("grad_output", "output")),
    "_masked_softmax_backward": _alike("grad_output", "output", "mask"),
    "_adaptive_avg_pool2d_backward": _adaptive_pool_backward(2, with_indices=False),
    "_adaptive_avg_pool3d_backward": _adaptive_pool_backward(3, with_indices=False),
    "adaptive_max_pool2d_backward": _adaptive_pool_backward(2, with_indices=True),
    "adaptive_max_pool3d_backward": _adaptive_pool_backward(3, with_indices=True),
    **{f"avg_pool{rank}d_backward": _pool_backward(
        f"aten::avg_pool{rank}d", f"{_POOL} ceil_mode count_include_pad divisor_override") for rank in (2, 3)},
    **{f"max_pool{rank}d_with_indices_backward": _pool_backward(
        f"aten::max_pool{rank}d_with_indices", f"{_POOL} dilation ceil_mode", rank=rank) for rank in (2, 3)},
    **{f"fractional_max_pool{rank}d_backward": _fractional_pool_backward(rank) for rank in (2, 3)},
    "max_pool1d": _max_pool1d,
    **{f"{kind}_pad{rank}d_backward": _padding_backward(f"aten::{kind}_pad{rank}d")
       for kind in ("reflection", "replication") for rank in (1, 2, 3)},
    **{f"grid_sampler_{rank}d_backward": _grid_sampler_backward(f"aten::grid_sampler_{rank}d") for rank in (2, 3)},
    "_grid_sampler_2d_cpu_fallback_backward": _grid_sampler_backward("aten::grid_sampler_2d"),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    "multi_margin_loss_backward": _multi_margin_backward,
    "multilabel_margin_loss_backward": _multilabel_margin_backward,
    **dict.fromkeys(("embedding_dense_backward", "embedding_backward"), embedding_backward),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), embedding_bag),
    **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward",
                     "_embedding_bag_per_sample_weights_backward"), embedding_bag_backward),
    **dict.fromkeys(("_ctc_loss", "ctc_loss"), ctc_loss),
    "_ctc_loss_backward": ctc_loss_backward,
    "_cdist_backward": _cdist_backward,
    "_pdist_backward": _pdist_backward,
    **dict.fromkeys(("lu_unpack", "lu_solve"), _pivots("LU_data", "LU_pivots")),
    "linalg_lu_solve": _pivots("LU", "pivots"),
    "linalg_ldl_solve": _pivots("LD", "pivots", symmetric=True),
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _transform),
    "_scaled_dot_product_flash_attention_for_cpu": layers.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": layers.attention_backward,
    **dict.fromkeys(("scaled_dot_product_attention", "scaled_dot_product_attention_kernel"), layers.whole_attention),
    "scaled_dot_product_attention_with_residuals": layers.attention_with_residuals,
    "scaled_dot_product_attention_backward": layers.attention_residuals,
    **{name: layers.recurrent_network(gates)
       for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))},
    **dict.fromkeys(("batch_norm_training", "batch_norm_inference", "batch_norm_gradients"), layers.whole_batch_norm),
    **dict.fromkeys(("rms_norm_training", "rms_norm_gradients"), layers.whole_rms_norm),
    "recurrent_packed": layers.packed_network,
    "recurrent_backward": layers.recurrent_network_backward,
    "segment_reduce": _segments,
    "_segment_reduce_backward": _segments_backward,
    "unfold_backward": _unfold_backward,
    **dict.fromkeys(("_weight_norm_interface", "_weight_norm_interface_backward"), _weight_norm),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_"), layers.fused_optimizer(*_ADAM)),
    "_fused_sgd_": layers.fused_optimizer("momentum_buffer_list"),
    "_fused_adagrad_": layers.fused_optimizer("state_sums"),
    **QUANTIZATION,
    "mkldnn_rnn_layer": layers.recurrent,
    "mkldnn_rnn_layer_backward": layers.recurrent_backward,
    "repeat_interleave": _repeats,
    "_chunk_cat": _chunks,
    "_native_multi_head_attention": layers.multi_head_attention,
    "_transformer_encoder_layer_fwd": layers.encoder_layer,
    "convolution_backward": _convolution_backward,
    "_convolution_double_backward": _convolution_double_backward,
    "embedding_bag": embedding_bag_whole,
    **{f"_upsample_{kind}2d_aa": _resampled for kind in ("bilinear", "bicubic", "lanczos")},
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), _power),
}
"""Rules by operator name, without overload."""
