"""Integers that say which index is exempt, or where indices begin, are checked as indices. Nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.allowlist import ALLOWED, lists, release
from djinn_plugins.guard.calls import check_of
from djinn_plugins.guard.kernels import RULES
from djinn_plugins.guard.layouts import base_of

aten = torch.ops.aten
INDICES = frozenset({"padding_idx", "ignore_index", "blank"})
"""Integers that are compared with indices."""
OF_DIMENSIONS = frozenset("""
    axis axis0 axis1 batch_dim ch_axis contraction_dim destination dim dim0 dim1 dim2 dimension dims dims_other
    dims_self end_dim expand1 expand2 expand3 ind source start_dim sumdim unroll_dim path physical_layout
""".split())
"""PyTorch wraps them, or refuses them."""
OF_SIZES = frozenset("""
    C HxW N batch_sizes bias_sizes bins chunks col correction embed_dim end from from_ group groups hidden_size high
    hop_length index indices input_lengths input_size input_sizes k kernel_size last_dim_size length low m max min
    minlength n n_fft normalized_shape num_chunks num_classes num_groups num_head num_heads num_layers num_samples
    num_splits num_weights offset output_padding output_size pad padding p r repeats row s sections self_sizes shape
    shifts size sizes split_size split_sizes start step steps storage_offset stride target_lengths to total_length
    win_length window_length dilation downscale_factor upscale_factor diagonal
""".split())
"""Sizes, and positions in views and factories: PyTorch computes a size of them, which it, or a rule, checks."""
OF_CHOICES = frozenset("""
    compute_mode dtype edge_order impl_index input_dtype interpolation_mode layout mask_type memory_format mode
    normalization out_dtype padding_mode pow recipe_a recipe_b reduction swizzle_a swizzle_b type1 type2
""".split())
OF_NUMBERS = frozenset("""
    data decimals divisor_override fill_value growth_interval quant_max quant_min zero_point
""".split())
"""What is computed with, and looked up nowhere."""
NOT_LOOKED_AT = frozenset({"embedding", "embedding_bag", "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd",
                           "nll_loss_forward", "nll_loss2d_forward"})
"""A forward pass that does not use it, or compares each index itself."""


def integers() -> dict[str, set[str]]:
    """Name the integers of all allowed overloads, each with the operators that take it."""
    found: dict[str, set[str]] = {}
    for name, group in lists()[release()].items():
        if group == ALLOWED:
            operator = operator_named(name)
            for argument in operator._schema.arguments:
                if str(argument.type) in ("int", "List[int]", "Optional[int]", "Optional[List[int]]"):
                    found.setdefault(argument.name, set()).add(base_of(operator))
    return found


def test_each_integer_of_an_allowed_operator_has_been_looked_at() -> None:
    """Another release of PyTorch may have more: then somebody has to say what they are."""
    assert integers().keys() - INDICES - OF_DIMENSIONS - OF_SIZES - OF_CHOICES - OF_NUMBERS == set()


def test_each_operator_that_exempts_an_index_has_a_rule() -> None:
    assert {operator for name in INDICES for operator in integers()[name]} - NOT_LOOKED_AT <= RULES.keys()


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def whole(*size: int) -> torch.Tensor:
    return meta(*size, dtype=torch.int64)


ROWS = 4
BAGS = {"indices": whole(3), "offset2bag": whole(3), "bag_size": whole(2), "maximum_indices": whole(2),
        "scale_grad_by_freq": False, "mode": 0, "per_sample_weights": None}
EXEMPTING: dict[str, dict[str, Any]] = {
    "embedding_dense_backward": {"grad_output": meta(3, 2), "indices": whole(3), "num_weights": ROWS,
                                 "scale_grad_by_freq": False},
    "embedding_backward": {"grad": meta(3, 2), "indices": whole(3), "num_weights": ROWS, "scale_grad_by_freq": False,
                           "sparse": False},
    **{name: {"weight": meta(ROWS, 2), "indices": whole(3), "offsets": whole(2)}
       for name in ("_embedding_bag", "_embedding_bag_forward_only")},
    "_embedding_bag_backward": {**BAGS, "grad": meta(2, 2), "offsets": whole(2), "num_weights": ROWS, "sparse": False},
    "_embedding_bag_dense_backward": {**BAGS, "grad": meta(2, 2), "num_weights": ROWS},
    "_embedding_bag_per_sample_weights_backward": {
        "grad": meta(2, 2), "weight": meta(ROWS, 2), "indices": whole(3), "offsets": whole(2), "offset2bag": whole(3),
        "mode": 0},
}


def test_all_operators_that_exempt_a_row_are_here() -> None:
    assert EXEMPTING.keys() | NOT_LOOKED_AT >= integers()["padding_idx"]


@pytest.mark.parametrize("name", list(EXEMPTING))
def test_a_row_that_is_exempt_exists(name: str) -> None:
    """Equal to the number of rows, it is none; no index is equal to it."""
    check = check_of(getattr(aten, name).default, 0)
    assert check is not None
    for padding in (-1, 0, ROWS - 1):
        check.expect((), {**EXEMPTING[name], "padding_idx": padding})
    for padding in (ROWS, ROWS + 1, 2**40):
        with pytest.raises(RuntimeError, match=f"padding_idx {padding} of {ROWS} rows"):
            check.expect((), {**EXEMPTING[name], "padding_idx": padding})


def test_an_exempt_row_is_in_range_like_any_other() -> None:
    check = check_of(aten.embedding_dense_backward.default, 0)
    assert check is not None
    given = {**EXEMPTING["embedding_dense_backward"], "grad_output": torch.ones(3, 2), "padding_idx": 1}
    check.expect((), {**given, "indices": torch.tensor([0, 1, 3])})
    for outside in (-1, ROWS):
        with pytest.raises(RuntimeError, match="are allowed"):
            check.expect((), {**given, "indices": torch.tensor([0, 1, outside])})


@pytest.mark.parametrize("mode", [-1, 3])
@pytest.mark.parametrize("name", [name for name in EXEMPTING if "bag" in name])
def test_bags_are_reduced_in_a_way_that_there_is(name: str, mode: int) -> None:
    check = check_of(getattr(aten, name).default, 0)
    assert check is not None
    with pytest.raises(RuntimeError, match=f"mode {mode}"):
        check.expect((), {**EXEMPTING[name], "padding_idx": -1, "mode": mode})


@pytest.mark.parametrize("name", ["nll_loss_backward", "nll_loss2d_backward"])
def test_classes_that_are_ignored_need_not_exist(name: str) -> None:
    """The kernels compare each target with it, on each of their paths, before they look anything up."""
    more = (2, 2) if "2d" in name else ()
    check = check_of(getattr(aten, name).default, 0)
    assert check is not None
    given = {"self": torch.ones(2, 3, *more), "weight": None, "reduction": 0, "total_weight": torch.ones(())}
    target = torch.zeros(2, *more, dtype=torch.int64)
    given["grad_output"] = target.float()
    for ignored in (-100, 3, 255):
        target.view(-1)[0] = ignored
        check.expect((), {**given, "target": target, "ignore_index": ignored})
        with pytest.raises(RuntimeError, match="are allowed"):
            check.expect((), {**given, "target": target, "ignore_index": ignored + 1})


@pytest.mark.parametrize("blank", [-1, 5])
def test_the_blank_of_a_sequence_is_a_class(blank: int) -> None:
    lengths = {"input_lengths": [3], "target_lengths": [1]}
    for name in ("_ctc_loss", "ctc_loss"):
        check = check_of(getattr(aten, name).IntList if name == "ctc_loss" else aten._ctc_loss.default, 0)
        assert check is not None
        with pytest.raises(RuntimeError, match="blank must be in label range"):
            check.expect((), {"log_probs": torch.zeros(3, 1, 5), "targets": torch.ones(1, 1, dtype=torch.int64),
                              **lengths, "blank": blank})
