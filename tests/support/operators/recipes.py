"""Right arguments of operators whose sizes must fit in ways that chance does not find, by name without overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

__all__ = ("RECIPES", "Recipe")

Recipe = Callable[[], dict[str, Any]]
"""Makes arguments by name; those that an overload does not have are left out."""


def _resampled(rank: int, **more: Any) -> Recipe:
    size, made = [4, 5, 3][:rank], [3, 6, 5][:rank]

    def recipe() -> dict[str, Any]:
        tensor = torch.rand(1, 2, *size)
        return {"self": tensor, "input": tensor, "grad_output": torch.rand(1, 2, *made), "output_size": made,
                "input_size": [1, 2, *size], "align_corners": False, "scale_factors": None, **more}

    return recipe


def _recurrent(gates: int, states: int) -> Recipe:
    def recipe() -> dict[str, Any]:
        state = [torch.rand(1, 2, 4) for _ in range(states)]
        return {
            "data": torch.rand(5, 3), "batch_sizes": torch.tensor([2, 2, 1]), "input": torch.rand(5, 2, 3),
            "batch_first": False, "hx": state if states > 1 else state[0],
            "params": [torch.rand(4 * gates, 3), torch.rand(4 * gates, 4), torch.rand(4 * gates),
                       torch.rand(4 * gates)],
            "has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}

    return recipe


def _rnn_layer(*, backward: bool) -> Recipe:
    def recipe() -> dict[str, Any]:
        made = {
            "input": torch.rand(3, 2, 4), **{f"weight{index}": weight for index, weight in enumerate((
                torch.rand(20, 4), torch.rand(20, 5), torch.rand(20), torch.rand(20)))},
            "hx_": torch.rand(1, 2, 5), "cx_": torch.rand(1, 2, 5), "reverse": False, "batch_sizes": [], "mode": 2,
            "hidden_size": 5, "num_layers": 1, "has_biases": True, "bidirectional": False, "batch_first": False,
            "train": True}
        if not backward:
            return made
        with torch.enable_grad():
            output, hidden, cell, workspace = torch.ops.aten.mkldnn_rnn_layer(*made.values())
        return {
            "input": made["input"], **{f"weight{index + 1}": made[f"weight{index}"] for index in range(4)},
            "hx_": made["hx_"], "cx_tmp": made["cx_"], "output": output, "hy_": hidden, "cy_": cell,
            "grad_output": torch.rand(3, 2, 5), "grad_hy": torch.rand(1, 2, 5), "grad_cy": torch.rand(1, 2, 5),
            **{name: made[name] for name in ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "train",
                                             "bidirectional", "batch_sizes", "batch_first")},
            "workspace": workspace}

    return recipe


def _bag() -> dict[str, Any]:
    return {
        "grad": torch.rand(2, 3), "weight": torch.rand(4, 3), "indices": torch.tensor([0, 1, 1, 2]),
        "offsets": torch.tensor([0, 2]), "offset2bag": torch.tensor([0, 0, 1, 1]), "bag_size": torch.tensor([2, 2]),
        "maximum_indices": torch.zeros(0, dtype=torch.int64), "num_weights": 4, "scale_grad_by_freq": False, "mode": 0,
        "sparse": False, "per_sample_weights": None}


def _connectionist(*, tensors: bool) -> Recipe:
    def recipe() -> dict[str, Any]:
        log_probs = torch.rand(6, 2, 4).log_softmax(-1)
        targets, lengths = torch.tensor([[1, 2], [3, 1]]), ([6, 5], [2, 1])
        loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, *lengths)
        inputs, wanted = map(torch.tensor, lengths) if tensors else lengths
        return {"grad": torch.rand(2), "log_probs": log_probs, "targets": targets, "input_lengths": inputs,
                "target_lengths": wanted, "neg_log_likelihood": loss, "log_alpha": alpha, "blank": 0}

    return recipe


def _quantized() -> dict[str, Any]:
    tensor = torch.rand(3, 4)
    return {"self": tensor, "scale": torch.rand(4) + 0.1, "zero_point": torch.zeros(4, dtype=torch.int32), "axis": 1,
            "quant_min": 0, "quant_max": 255, "grad": tensor, "mask": tensor > 0.5}


def _learned(*size: int) -> Recipe:
    def recipe() -> dict[str, Any]:
        tensor = torch.rand(3, 4)
        return {"self": tensor, "X": tensor, "grad": tensor, "dY": tensor, "scale": torch.rand(size) + 0.1,
                "zero_point": torch.zeros(size), "axis": 1, "quant_min": 0, "quant_max": 255, "grad_factor": 1.0}

    return recipe


def _observed(rows: int) -> Recipe:
    def recipe() -> dict[str, Any]:
        return {"self": torch.rand(3, 4, 2), "observer_on": torch.ones(1, dtype=torch.int64),
                "fake_quant_on": torch.ones(1, dtype=torch.int64), "running_min": torch.zeros(rows),
                "running_max": torch.ones(rows), "scale": torch.ones(rows),
                "zero_point": torch.zeros(rows, dtype=torch.int32), "averaging_const": 0.01, "quant_min": 0,
                "quant_max": 255, "ch_axis": 0, "per_row_fake_quant": rows > 1, "symmetric_quant": False}

    return recipe


def _scaled(rows: bool) -> dict[str, Any]:
    return {"self": torch.rand(16, 32).to(torch.float8_e4m3fn), "mat2": torch.rand(16, 32).to(torch.float8_e4m3fn).t(),
            "scale_a": [torch.ones(16, 1) if rows else torch.ones(())], "recipe_a": [int(rows)], "swizzle_a": [],
            "scale_b": [torch.ones(1, 16) if rows else torch.ones(())], "recipe_b": [int(rows)], "swizzle_b": [],
            "bias": None, "out_dtype": torch.bfloat16, "contraction_dim": [], "use_fast_accum": False}


def _batch_norm() -> dict[str, Any]:
    tensor, channels = torch.rand(2, 3, 4), [torch.rand(3) for _ in range(6)]
    weight, bias, mean, variance, saved_mean, saved_variance = channels
    return {"input": tensor, "weight": weight, "bias": bias, "running_mean": mean, "running_var": variance,
            "training": True, "train": True, "update": True, "momentum": 0.1, "eps": 1e-5, "epsilon": 1e-5,
            "cudnn_enabled": False, "impl_index": 0, "grad_output": tensor, "grad_out": tensor,
            "save_mean": saved_mean, "save_invstd": saved_variance, "save_var": saved_variance,
            "save_var_transform": saved_variance, "output_mask": [True, True, True],
            "reservedSpace": torch.zeros(0, dtype=torch.uint8), "reserve": torch.zeros(0, dtype=torch.uint8)}


def _convolution() -> dict[str, Any]:
    return {"input": torch.rand(1, 2, 5, 5), "weight": torch.rand(3, 2, 3, 3), "bias": torch.rand(3),
            "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
            "groups": 1, "benchmark": False, "deterministic": False, "cudnn_enabled": False, "allow_tf32": False,
            "ggI": torch.rand(1, 2, 5, 5), "ggW": torch.rand(3, 2, 3, 3), "ggb": torch.rand(3),
            "gO": torch.rand(1, 3, 5, 5), "self": torch.rand(1, 2, 5, 5), "output_mask": [True, True, True]}


def _attention() -> dict[str, Any]:
    query = torch.rand(2, 3, 8)
    return {"query": query, "key": query.clone(), "value": query.clone(), "src": query, "embed_dim": 8, "num_head": 2,
            "num_heads": 2, "qkv_weight": torch.rand(24, 8), "qkv_bias": torch.rand(24),
            "proj_weight": torch.rand(8, 8), "proj_bias": torch.rand(8), "use_gelu": False, "norm_first": False,
            "eps": 1e-5,
            **{f"norm_{word}_{index}": torch.rand(8) for word in ("weight", "bias") for index in (1, 2)},
            "ffn_weight_1": torch.rand(12, 8), "ffn_bias_1": torch.rand(12), "ffn_weight_2": torch.rand(8, 12),
            "ffn_bias_2": torch.rand(8)}


def _weight_norm() -> dict[str, Any]:
    return {"v": torch.rand(3, 4), "g": torch.rand(3, 1), "dim": 0, "grad_w": torch.rand(3, 4),
            "saved_v": torch.rand(3, 4), "saved_g": torch.rand(3, 1), "saved_norms": torch.rand(3, 1)}


def _histogram() -> dict[str, Any]:
    return {"self": torch.rand(6, 2), "bins": [3, 4], "range": None, "weight": None, "density": False}


def _histogram_of_edges() -> dict[str, Any]:
    return {"self": torch.rand(6, 2), "bins": [torch.linspace(0, 1, 4), torch.linspace(0, 1, 3)], "weight": None,
            "density": False}


def _packed() -> dict[str, Any]:
    return {"input": torch.rand(3, 2, 4), "lengths": torch.tensor([3, 2]), "batch_first": False,
            "grad": torch.rand(5, 4), "input_size": [3, 2, 4], "batch_sizes": torch.tensor([2, 2, 1]),
            "data": torch.rand(5, 4), "padding_value": 0.0, "total_length": 3}


def _packed_scalars() -> dict[str, Any]:
    tensors = [[torch.rand(3), torch.rand(2, 2)] for _ in range(3)]
    return {"self": tensors[0], "tensor1": tensors[1], "tensor2": tensors[2], "scalars": torch.rand(2)}


def _one(**values: Callable[[], Any] | float | str | list[int] | None) -> Recipe:
    """Make what is given, anew each time where it is a function."""
    return lambda: {name: value() if callable(value) else value for name, value in values.items()}


def _rand(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(size).to(dtype)


def _ints(*items: int, dtype: torch.dtype = torch.int64) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(items, dtype=dtype)


RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    **{f"_upsample_{kind}2d_aa{back}": (_resampled(2),)
       for kind in ("bicubic", "bilinear", "lanczos") for back in ("", "_backward")},
    **{f"{kind}{rank}d{back}": (_resampled(rank),) for kind in ("_upsample_nearest_exact", "upsample_nearest")
       for rank in (1, 2, 3) for back in ("", "_backward")},
    **dict.fromkeys(("affine_grid_generator", "affine_grid_generator_backward"), (
        _one(theta=_rand(2, 2, 3), grad=_rand(2, 4, 5, 2), size=[2, 3, 4, 5], align_corners=False),)),
    **{f"fake_quantize_per_channel_affine{more}": (_quantized,)
       for more in ("", "_cachemask", "_cachemask_backward")},
    **{f"_fake_quantize_learnable_per_{kind}_affine{more}": (_learned(size),)
       for kind, size in (("tensor", 1), ("channel", 4)) for more in ("", "_backward")},
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (_one(
        self=_rand(3, 4), scale=_rand(1), zero_point=_ints(3, dtype=torch.int32), fake_quant_enabled=_ints(1),
        quant_min=0, quant_max=255),),
    **dict.fromkeys(("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"),
                    (_observed(1), _observed(3))),
    **{name: (_recurrent(gates, states),) for name, gates, states in (
        ("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1))},
    "mkldnn_rnn_layer": (_rnn_layer(backward=False),),
    "mkldnn_rnn_layer_backward": (_rnn_layer(backward=True),),
    **dict.fromkeys(("_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
                     "_embedding_bag_backward", "_embedding_bag_forward_only", "_embedding_bag"), (_bag,)),
    "_ctc_loss_backward": (_connectionist(tensors=False), _connectionist(tensors=True)),
    **dict.fromkeys(("_batch_norm_impl_index", "_batch_norm_impl_index_backward", "_batch_norm_no_update",
                     "batch_norm_update_stats", "batch_norm_backward", "native_batch_norm_backward",
                     "_native_batch_norm_legit_no_training", "_batch_norm_with_update"), (_batch_norm,)),
    **dict.fromkeys(("_convolution", "_convolution_double_backward"), (_convolution,)),
    **dict.fromkeys(("_native_multi_head_attention", "_transformer_encoder_layer_fwd"), (_attention,)),
    **{f"_weight_norm{more}": (_weight_norm,)
       for more in ("", "_interface", "_interface_backward", "_differentiable_backward")},
    **dict.fromkeys(("_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "histogramdd"), (_histogram,)),
    "_histogramdd_from_bin_tensors": (_histogram_of_edges,),
    **dict.fromkeys(("_pack_padded_sequence", "_pack_padded_sequence_backward", "_pad_packed_sequence"), (_packed,)),
    **{f"_foreach_addc{kind}{end}": (_packed_scalars,) for kind in ("mul", "div") for end in ("", "_")},
    "_int_mm": (_one(self=_rand(17, 16, dtype=torch.int8), mat2=_rand(16, 8, dtype=torch.int8)),),
    "_convolution_mode": tuple(lambda padding=padding: {**_convolution(), "padding": padding}
                               for padding in ("same", "valid")),
    "_reshape_from_tensor": (_one(self=_rand(2, 3), shape=_ints(3, 2)),),
    "_scaled_mm": (lambda: {
        "self": torch.rand(16, 32).to(torch.float8_e4m3fn), "mat2": torch.rand(16, 32).to(torch.float8_e4m3fn).t(),
        "scale_a": torch.ones(()), "scale_b": torch.ones(()), "out_dtype": torch.float32},),
    "_scaled_mm_v2": tuple(partial(_scaled, rows) for rows in (False, True)),
    **dict.fromkeys(("glu_jvp", "glu_backward_jvp"), (
        _one(glu=_rand(2, 2), x=_rand(2, 4), dx=_rand(2, 4), dim=1, grad_x=_rand(2, 4), grad_glu=_rand(2, 2),
             dgrad_glu=_rand(2, 2)),)),
    "linalg_norm": (_one(self=_rand(3, 4), ord="fro", dim=[0, 1], keepdim=False),),
    "gradient": (
        lambda: {"self": torch.rand(4, 5), "spacing": [torch.rand(4)], "dim": 0},
        *(_one(self=_rand(4, 5), spacing=spacing, dim=[0, 1])
          for spacing in (1.0, [1, 2], lambda: [torch.rand(4), torch.rand(5)]))),
    **dict.fromkeys(("nll_loss2d", "nll_loss2d_forward"), (lambda: {
        "self": torch.rand(2, 3, 4, 4), "target": torch.randint(0, 3, (2, 4, 4)), "weight": None, "reduction": 1,
        "ignore_index": -100},)),
    "_compute_linear_combination": (_one(input=_rand(4, 3), coefficients=_rand(2, 4)),),
    **dict.fromkeys(("conv_tbc", "conv_tbc_backward"), (
        _one(self=_rand(5, 2, 3), input=_rand(5, 2, 3), weight=_rand(3, 3, 4), bias=_rand(4), pad=1),
        lambda: {"self": torch.rand(5, 2, 4), "input": torch.rand(5, 2, 3), "weight": torch.rand(3, 3, 4),
                 "bias": torch.rand(4), "pad": 1})),
    "masked_select_backward": (lambda: {
        "grad": torch.rand(2), "input": torch.rand(3), "mask": torch.tensor([True, False, True])},),
    "value_selecting_reduction_backward": (
        _one(grad=_rand(2), dim=1, indices=_ints(0, 1), sizes=[2, 3], keepdim=False),),
    "native_channel_shuffle": (_one(self=_rand(1, 4, 2, 2), groups=2),),
    "_grouped_mm": (lambda: {
        "self": torch.rand(8, 16).bfloat16(), "mat2": torch.rand(2, 16, 16).bfloat16(),
        "offs": torch.tensor([4, 8], dtype=torch.int32)},),
    "_amp_foreach_non_finite_check_and_unscale_": (lambda: {
        "self": [torch.rand(3), torch.rand(2, 2)], "found_inf": torch.zeros(1), "inv_scale": torch.ones(1)},),
    "_amp_update_scale_": (_one(self=_rand(1), growth_tracker=_ints(1, dtype=torch.int32), found_inf=_rand(1),
                                scale_growth_factor=2.0, scale_backoff_factor=0.5, growth_interval=10),),
    "unflatten_dense_tensors": (lambda: {"flat": torch.rand(7), "tensors": [torch.rand(3), torch.rand(2, 2)]},),
    "cummaxmin_backward": (_one(grad=_rand(4), input=_rand(4), indices=_ints(0, 0, 2, 2), dim=0),),
    "slice_inverse": (lambda: {"self": torch.rand(4)[1:3], "src": torch.rand(4), "dim": 0, "start": 1, "end": 3},),
    "matrix_exp_backward": (_one(self=_rand(3, 3), grad=_rand(3, 3)),),
    "trace_backward": (_one(grad=_rand(), sizes=[3, 4]),),
    "rrelu_with_noise": (lambda: {"self": -torch.rand(5), "noise": torch.rand(5), "lower": 0.1, "upper": 0.3,
                                  "training": True, "generator": None, "out": torch.rand(5)},),
    "float_power_": (lambda: {"self": torch.rand(3).double(), "exponent": torch.rand(3).double()},),
    "embedding_backward": (_one(grad=_rand(3, 4), indices=_ints(0, 2, 1), num_weights=5, padding_idx=-1,
                                scale_grad_by_freq=False, sparse=False),),
    "index_select_backward": (_one(grad=_rand(2, 3), self_sizes=[4, 3], dim=0, index=_ints(0, 2)),),
    "chain_matmul": (lambda: {"matrices": [torch.rand(2, 3), torch.rand(3, 4), torch.rand(4, 2)]},),
}
