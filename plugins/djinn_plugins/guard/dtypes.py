"""Dtypes of operands: kernels of whole layers take the dtype of their first tensor for all of them.

So the operands of every operator that has a rule for its sizes, and of every fused one, have one dtype. The exceptions
are those that PyTorch itself makes, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import torch

from djinn.ir.spec import tensors_in
from djinn_plugins.guard.fused_kernels import Rule
from djinn_plugins.guard.kernels import RULES
from djinn_plugins.guard.preconditions import Named, expect

__all__ = ("FUSED_NAMES", "dtype_rule")

_HALVES = frozenset((torch.bfloat16, torch.float16))
_FUSED = frozenset("""
    native_layer_norm layer_norm batch_norm instance_norm group_norm _batch_norm_impl_index _fused_rms_norm_backward
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell convolution _convolution
""".split())
"""Fused operators without a rule for their sizes, which PyTorch checks."""


@attrs.frozen
class _Exceptions:
    """Arguments of an operator that may have another dtype than the others.

    Attributes:
        single: They may have single precision where the others have half, as PyTorch's norms have statistics.
        always_single: They have single precision, whatever the others have.
        any_dtype: One number is read of them, and converted.
        truths: They may be truth values, which PyTorch's public function converts.
    """

    single: frozenset[str] = frozenset()
    always_single: frozenset[str] = frozenset()
    any_dtype: frozenset[str] = frozenset()
    truths: frozenset[str] = frozenset()


_STATISTICS = _Exceptions(single=frozenset("""
    weight bias running_mean running_var save_mean save_var save_invstd save_var_transform mean rstd variance logsumexp
    saved_g saved_norms g
""".split()))
"""What norms and attention keep in single precision; other fused operators have no such arguments in two dtypes."""
_LOOKED_UP = frozenset("""
    indices offsets offset2bag bag_size maximum_indices target targets input_lengths target_lengths lengths LU_pivots
    pivots batch_sizes repeats mask workspace reserve reservedSpace random
""".split())
"""Indices, lengths, masks and opaque bytes, if they are no real numbers: rules and kernels ask for their dtypes."""
_OPTIMIZER = _Exceptions(
    always_single=frozenset({"state_steps", "grad_scale", "found_inf"}), any_dtype=frozenset({"lr"}))
_EXCEPTIONS: Mapping[str, _Exceptions] = {
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), _OPTIMIZER),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "scaled_dot_product_attention_kernel", "scaled_dot_product_attention_backward",
         "scaled_dot_product_attention_with_residuals"),
        attrs.evolve(_STATISTICS, truths=frozenset({"attn_mask"}))),
}


_FREE = frozenset("""
    _scaled_mm_v2 _fused_moving_avg_obs_fq_helper fused_moving_avg_obs_fake_quant
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _chunk_cat _fft_r2c _fft_c2r
""".split())
"""Products of scaled matrices and observers, whose kernels ask for the dtype of each pointer; joins and loops over a
TensorIterator, which converts; and transforms between real and complex numbers, which have a rule of their own."""
FUSED_NAMES = (_FUSED | RULES.keys()) - _FREE
"""The operators, without overloads, whose operands have one dtype."""


def _one_dtype(exceptions: _Exceptions, named: Named) -> None:
    main: dict[torch.dtype, str] = {}
    single: dict[torch.dtype, str] = {}
    for name, item in named.items():
        if item is None or name in exceptions.any_dtype:
            continue
        for tensor in (item,) if isinstance(item, torch.Tensor) else tensors_in((item,)):
            dtype = tensor.dtype
            if name in exceptions.always_single:
                expect(dtype is torch.float32, f"{name} of {dtype}, not torch.float32")
            elif name == "attn_mask" and dtype is torch.float32:
                # Attention takes it for queries of any dtype, and has kernels for it.
                continue
            elif name in exceptions.truths and dtype is torch.bool:
                continue
            elif name not in _LOOKED_UP or dtype.is_floating_point or dtype.is_complex:
                (single if name in exceptions.single else main).setdefault(dtype, name)
    expect(len(main) < 2, f"{_said(main)}: tensors of several dtypes")
    allowed = {*main, torch.float32} if not _HALVES.isdisjoint(main) else main or dict.fromkeys([*single][:1])
    expect(all(dtype in allowed for dtype in single), f"{_said({**main, **single})}: tensors of several dtypes")


def _said(dtypes: Mapping[torch.dtype, str]) -> str:
    return ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items())


def dtype_rule(base: str) -> Rule | None:
    """Return the rule for the dtypes of an operator's operands; ``None`` if PyTorch checks or converts them."""
    return partial(_one_dtype, _EXCEPTIONS.get(base, _STATISTICS)) if base in FUSED_NAMES else None
