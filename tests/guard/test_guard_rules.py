"""Rules of the guard, asked about operands that have no elements, or with a stand-in for a dtype's smallest number.

No kernel is called. Operands that do not fit are too large wherever that is refused, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.operators.asking import ask, empty

from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard import faults

FLOAT, WHOLE, TRUTH = torch.float32, torch.int64, torch.bool


SCORES = empty(2, 3, 8, 8)
BAGS = [empty(4, 3), empty(3, dtype=WHOLE), empty(1, dtype=WHOLE)]
NORM = [empty(2, 3), empty(2, 3), *[empty(3)] * 5, True, 1e-5, [True] * 3]
RULES: dict[str, tuple[str, list[Any], dict[str, Any], dict[str, Any]]] = {
    "a mask of more queries": ("_masked_softmax", [SCORES], {"mask": empty(8, 8, dtype=TRUTH), "mask_type": 0},
                               {"mask": empty(9, 8, dtype=TRUTH)}),
    "a mask of a greater length": ("_masked_softmax", [SCORES], {"mask": empty(2, 8, dtype=TRUTH), "mask_type": 1},
                                   {"mask": empty(2, 9, dtype=TRUTH)}),
    "a mask of numbers": ("_masked_softmax", [SCORES], {"mask": empty(2, 3, 8, 8, dtype=TRUTH)},
                          {"mask": empty(2, 3, 8, 8)}),
    "fewer coefficients than terms": ("_compute_linear_combination", [empty(4, 30)], {"coefficients": empty(2, 4)},
                                      {"coefficients": empty(2, 3)}),
    "factors of another batch": ("linalg_ldl_solve", [empty(2, 5, 5), empty(2, 5, dtype=torch.int32)],
                                 {"B": empty(2, 5, 3)}, {"B": empty(5)}),
    "no right-hand sides": ("linalg_lstsq", [empty(5, 3)], {"b": empty(5, 2), "driver": "gelss"}, {"b": empty(5, 0)}),
    "indices of two dimensions": ("_embedding_bag_forward_only", BAGS[:1], {"indices": BAGS[1], "offsets": BAGS[2]},
                                  {"indices": empty(6, 6, dtype=WHOLE)}),
    "no bag for an index": ("_embedding_bag", BAGS, {"include_last_offset": False}, {"include_last_offset": True}),
    "more norms than rows": ("_weight_norm", [empty(2, 3, 4)], {"g": empty(2, 1, 1), "dim": 0}, {"g": empty(3, 1, 1)}),
    "norms of no rows": ("_weight_norm_interface", [empty(2, 4), empty(2, 1)], {"dim": 0},
                         {"v": empty(0, 4), "g": empty(0, 1)}),
    "distances of no rows": ("_pdist_backward", [empty(3)], {"self": empty(3, 2), "p": 2.0, "pdist": empty(3)},
                             {"self": empty(0, 2)}),
    "statistics of no elements": ("native_batch_norm_backward", NORM[:1], dict(zip((
        "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd", "train", "eps", "output_mask"),
        NORM[1:], strict=True)), {"input": empty(0, 3)}),
    "more statistics than channels": ("native_batch_norm", [empty(2, 3, 4)], {
        "weight": None, "bias": None, "running_mean": empty(3), "running_var": empty(3), "training": True,
        "momentum": 0.1, "eps": 1e-5}, {"running_mean": empty(4)}),
    "heads that are none": ("_scaled_dot_product_flash_attention_for_cpu", [], {
        name: empty(2, 1, 3, 4) for name in ("query", "key", "value")},
        {name: empty(2, 0, 3, 4) for name in ("query", "key", "value")}),
    "more edges than can be counted": ("histogram.bin_ct_out", [empty(4)], {
        "bins": 2**58, "hist": empty(1), "bin_edges": empty(2)}, {"bins": 2**60}),
    "a stride of 0 in what is joined": ("cat.out", [[empty(1, 1)], 1], {"out": empty(1, 1)},
                                        {"out": empty(1).as_strided((1, 1), (0, 0))}),
    "more noise in out": ("rrelu_with_noise.out", [empty(3), empty(3)], {"out": empty(3)}, {"out": empty(4)}),
    "a transform of a dimension counted from the end": (
        "_fft_c2c", [empty(5, 6, dtype=torch.complex64)], {"dim": [1], "normalization": 0, "forward": True},
        {"dim": [-1]}),
    "a scale that leads beyond what can be counted": (
        "_upsample_nearest_exact2d", [empty(1, 3, 8, 8)], {"output_size": [16, 16], "scales_h": 2.0, "scales_w": 2.0},
        {"scales_h": 2.0**-28}),
}


@pytest.mark.parametrize("what", list(RULES))
def test_a_kernel_that_does_not_compare_gets_what_fits(what: str) -> None:
    name, args, right, wrong = RULES[what]
    names = [argument.name for argument in operator_named(f"aten::{name}")._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **right}
    ask(name, (), given)
    with pytest.raises(RuntimeError):
        ask(name, (), {**given, **wrong})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_quotient_that_does_not_fit_its_dtype_is_refused(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The smallest number of a dtype has no opposite. Here it is thought to be -8, which has one."""
    left, right = torch.tensor([4, -8, 9], dtype=dtype), torch.tensor([1, -1, 3], dtype=dtype)
    assert faults._whole({"self": left, "other": right})[2] == torch.iinfo(dtype).min  # type: ignore[index]
    ask("div.Tensor_mode", (left, right), {"rounding_mode": "trunc"})
    ask("lcm", (left, right), {})
    monkeypatch.setattr(faults, "_whole", lambda named: (named["self"], torch.as_tensor(named["other"]), -8))
    truncates = {"rounding_mode": "trunc"}
    for name, words in (("div.Tensor_mode", truncates), ("div_.Tensor_mode", truncates), ("lcm", {}), ("lcm_", {})):
        with pytest.raises(RuntimeError, match="does not fit|a multiple of"):
            ask(name, (left, right), words)
    ask("div.Tensor_mode", (left, -right), {"rounding_mode": "floor"})
    ask("div.Tensor_mode", (left[:1], right[:1]), {"rounding_mode": "trunc"})


@pytest.mark.parametrize("step", [0.25, -0.5])
def test_no_range_of_integers_has_a_step_of_none(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """Kernels of PyTorch 2.12 and earlier divide by it as an integer."""
    given = {"start": 0, "end": 1, "step": step, "out": empty(4, dtype=WHOLE)}
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    with pytest.raises(RuntimeError, match="step must be nonzero"):
        ask("arange.start_out", (), given)
    ask("arange.start_out", (), {**given, "out": empty(4)})
    ask("arange.start_out", (), {**given, "step": 1.5})


def test_bags_and_segments_begin_and_end_where_their_elements_do() -> None:
    """Asked only: the elements that are wrong have to be there."""
    indices, none = torch.tensor([0, 1, 2]), torch.arange(0)
    bags = {"grad": torch.ones(2, 5), "indices": indices, "offset2bag": none, "bag_size": none, "maximum_indices": none,
            "num_weights": 5, "scale_grad_by_freq": False, "mode": 0, "sparse": False, "per_sample_weights": None}
    ask("_embedding_bag_backward", (), {**bags, "offsets": torch.tensor([0, 2])})
    for offsets in ([1, 2], [0, 4], [0, -1]):
        with pytest.raises(RuntimeError, match="offsets"):
            ask("_embedding_bag_backward", (), {**bags, "offsets": torch.tensor(offsets)})
    segments = {"data": torch.ones(6, 2), "reduce": "max", "unsafe": True}
    ask("segment_reduce", (), {**segments, "lengths": torch.tensor([4, 2])})
    with pytest.raises(RuntimeError, match="do not add up"):
        ask("segment_reduce", (), {**segments, "lengths": torch.tensor([5, 2])})
