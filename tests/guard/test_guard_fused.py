"""Fused kernels get operands of one dtype. The guard is asked by metadata only: nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.operators.asking import ask, empty

from djinn_plugins.common.operators.operators import LAYER_OPERATORS, operator_named
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.guard.allowlist import ALLOWED, lists, release
from djinn_plugins.guard.calls import check_of
from djinn_plugins.guard.dtypes import FUSED_NAMES, dtype_rule
from djinn_plugins.guard.kernels import RULES
from djinn_plugins.guard.layouts import base_of

OTHERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.uint8,
          torch.bool)
ONE_NUMBER = {("lr", dtype) for dtype in OTHERS}
LOOKED_UP = frozenset("""
    indices offsets offset2bag bag_size maximum_indices target targets input_lengths target_lengths lengths LU_pivots
    pivots batch_sizes repeats mask workspace reserve reservedSpace random
""".split())
"""Indices, lengths, masks and opaque bytes may be no real numbers."""
SINGLE_BESIDE_HALF = set("""
    weight bias running_mean running_var save_mean save_var save_invstd save_var_transform mean rstd variance logsumexp
    attn_mask saved_g saved_norms g lr grad_scale found_inf state_steps
""".split())
"""What PyTorch keeps in single precision beside half precision."""


WHOLE_ATTENTION = frozenset(f"scaled_dot_product_attention{part}" for part in (
    "", "_kernel", "_backward", "_with_residuals"))
"""Its mask may be truth values: PyTorch's public function converts them."""
MASKS = {("attn_mask", torch.bool)}


def fused() -> Iterator[torch._ops.OpOverload]:
    for name, group in lists()[release()].items():
        operator = operator_named(name)
        if group == ALLOWED and base_of(operator) in FUSED_NAMES:
            yield operator
    CpuExecutor()
    yield from map(operator_named, LAYER_OPERATORS)


def tensors_of(operator: torch._ops.OpOverload) -> dict[str, Any]:
    """Name the arguments that are tensors, or lists of them."""
    return {argument.name: str(argument.type) for argument in operator._schema.arguments
            if "Tensor" in str(argument.type)}


def accepted(operator: torch._ops.OpOverload, main: torch.dtype) -> set[tuple[str, torch.dtype]]:
    """Say in which other dtypes operands are accepted, one by one."""
    rule = dtype_rule(base_of(operator))
    kinds = tensors_of(operator)
    assert rule is not None
    found = set()

    def made(name: str, dtype: torch.dtype) -> Any:
        wanted = torch.float32 if name in ("state_steps", "grad_scale", "found_inf") and dtype is main else dtype
        tensor = torch.empty(1, dtype=wanted, device="meta")
        return [tensor, tensor] if "List" in kinds[name] else tensor

    usual = {name: made(name, main) for name in kinds}
    rule(usual)
    for name in kinds if len(kinds) > 1 else ():
        for other in OTHERS:
            if other is not main:
                try:
                    rule({**usual, name: made(name, other)})
                except RuntimeError:
                    continue
                if name not in LOOKED_UP or other.is_floating_point:
                    found.add((name, other))
    return found


def test_an_operand_of_another_dtype_is_refused_by_every_fused_overload() -> None:
    count = 0
    for operator in fused():
        count += 1
        beside = {"attn_mask"} & tensors_of(operator).keys()
        for main in (torch.float32, torch.float64):
            rest = accepted(operator, main) - ONE_NUMBER
            if base_of(operator) in WHOLE_ATTENTION:
                rest -= MASKS
            single = {(name, torch.float32) for name in (*beside, "state_steps", "grad_scale", "found_inf")}
            # A norm has one operand beside its statistics, which are in single precision.
            alone = tensors_of(operator).keys() - SINGLE_BESIDE_HALF
            halves = {(name, half) for name in alone for half in (torch.bfloat16, torch.float16) if len(alone) == 1}
            assert rest <= (single if main is torch.float64 else halves), operator
    assert count > 150


def test_beside_half_precision_only_statistics_are_single() -> None:
    found = {name for operator in fused() for name, dtype in accepted(operator, torch.bfloat16) - ONE_NUMBER
             if dtype is torch.float32}
    assert found <= SINGLE_BESIDE_HALF
    assert {"weight", "running_mean", "save_invstd", "rstd"} <= found
    assert all(dtype is torch.float32 for operator in fused()
               for _, dtype in accepted(operator, torch.bfloat16) - ONE_NUMBER - (
                   MASKS if base_of(operator) in WHOLE_ATTENTION else set()))


def test_opaque_bytes_are_no_numbers() -> None:
    """Whatever release calls them a reserve or a workspace: eager passes bytes beside real numbers."""
    found = {name for operator in fused() for name in tensors_of(operator)
             if any(word in name.lower() for word in ("reserve", "workspace"))}
    assert found == {"workspace", "reserve", "reservedSpace"}
    for operator in fused():
        rule, names = dtype_rule(base_of(operator)), tensors_of(operator)
        assert rule is not None
        for name in found & names.keys():
            rule({"input": empty(2), name: empty(2, dtype=torch.uint8)})


def test_whoever_has_a_rule_for_sizes_has_one_for_dtypes() -> None:
    """But for products of scaled matrices and observers, whose kernels ask for the dtype of each pointer.

    Joins convert, and transforms of real numbers write complex ones, which their own rule asks for.
    """
    assert {name for name in RULES if dtype_rule(name) is None} == {
        "_scaled_mm_v2", "_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_chunk_cat", "_fft_r2c", "_fft_c2r"}


@pytest.mark.parametrize(("name", "given", "right", "wrong"), [
    ("_fft_r2c.out", torch.float32, torch.complex64, (torch.complex128, torch.int64)),
    ("_fft_c2r.out", torch.complex64, torch.float32, (torch.float64, torch.int64)),
])
def test_a_transform_writes_numbers_of_the_same_precision(
        name: str, given: torch.dtype, right: torch.dtype, wrong: tuple[torch.dtype, ...]) -> None:
    words: dict[str, Any] = {"dim": [0], "normalization": 0}
    words |= {"onesided": True} if "r2c" in name else {"last_dim_size": 2}
    ask(name, [empty(2, dtype=given)], {**words, "out": empty(2, dtype=right)})
    for dtype in wrong:
        with pytest.raises(RuntimeError, match="transformed to"):
            ask(name, [empty(2, dtype=given)], {**words, "out": empty(2, dtype=dtype)})


@pytest.mark.parametrize("name", ["grad_output", "grad_hy", "grad_cy", "weight1", "hx_"])
def test_the_gradient_of_a_recurrent_layer_is_asked_for_dtypes_before_its_call(name: str) -> None:
    """Wider than the layer, which is no harm."""
    sizes = {"input": (3, 2, 4), "weight1": (20, 4), "weight2": (20, 5), "weight3": (20,), "weight4": (20,),
             "hx_": (1, 2, 5), "cx_tmp": (1, 2, 5), "output": (3, 2, 5), "hy_": (1, 2, 5), "cy_": (1, 2, 5),
             "grad_output": (3, 2, 5), "grad_hy": (1, 2, 5), "grad_cy": (1, 2, 5)}
    words = {"reverse": False, "mode": 2, "hidden_size": 5, "num_layers": 1, "has_biases": True, "train": True,
             "bidirectional": False, "batch_sizes": [], "batch_first": False}
    check = check_of(torch.ops.aten.mkldnn_rnn_layer_backward.default, 0)
    assert check is not None

    def ask(dtype: torch.dtype) -> None:
        given = {mine: torch.zeros(size, dtype=dtype if mine == name else torch.float32)
                 for mine, size in sizes.items()}
        with torch.enable_grad():
            room = torch.ops.aten.mkldnn_rnn_layer(
                *(torch.zeros(sizes[each]) for each in ("input", "weight1", "weight2", "weight3", "weight4", "hx_",
                                                        "cx_tmp")), False, [], 2, 5, 1, True, False, False, True)[3]
        check.expect((), {**given, **words, "workspace": room})

    ask(torch.float32)
    with pytest.raises(RuntimeError, match="several dtypes"):
        ask(torch.float64)
