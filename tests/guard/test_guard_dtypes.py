"""Rules of the guard about dtypes and dimensions, asked with tensors that have no elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.operators.asking import ask, empty

SAID = ("summed as|written as|dim 1 of|negative dimension|a window of|(elements in|bytes of) a storage|infs or NaNs|"
        "only supports 2D|multiplication overflow")
COMPLEX, REAL, NARROW = torch.complex64, torch.float32, torch.float16


@pytest.mark.parametrize(("name", "args", "right", "wrong"), [
    ("linalg__powsum", [empty(3, dtype=COMPLEX)], {"dtype": torch.complex128}, {"dtype": NARROW}),
    ("_foreach_powsum.Scalar", [[empty(3), empty(3, dtype=COMPLEX)]], {"dtype": COMPLEX}, {"dtype": NARROW}),
    ("_logcumsumexp.out", [empty(3), 0], {"out": empty(3)}, {"out": empty(3, dtype=NARROW)}),
    ("_chunk_cat", [[empty(3), empty(2, 3)]], {"dim": 0, "num_chunks": 2}, {"dim": 1, "num_chunks": 2}),
    ("_chunk_cat.out", [[empty(3)], 0], {"num_chunks": 2, "out": empty(2, 2)},
     {"num_chunks": 2, "out": empty(2, 2), "dim": 1}),
    ("linalg_eigvals", [], {"self": torch.ones(1, 1)}, {"self": torch.full((1, 1), math.nan)}),
    ("_pdist_forward", [], {"self": empty(3, 2)}, {"self": empty(2, 3, 2)}),
    *(("set_.source_Tensor_storage_offset", [empty(3, 2)[:, 0], empty(4), 0, [3]], {"stride": right},
       {"stride": wrong}) for right, wrong in (([1], []), ([3], [2]))),
    *((name, [size], {"out": empty(2)}, {"out": empty(2), "size": [-1, 3]}) for name, size in (
        ("rand.out", [2]), ("zeros.out", [2]), ("empty.out", [0]))),
    ("resize_", [empty(2)], {"size": [2]}, {"size": [-2, -2]}),
    ("set_.source_Tensor_storage_offset", [empty(2), empty(4), 0], {"size": [2]}, {"size": [-2, -2]}),
    ("new_empty_strided", [empty(2)], {"size": [2], "stride": [1]}, {"size": [-2], "stride": []}),
    ("resize_", [empty(1).expand(3), [3]], {}, {"memory_format": torch.contiguous_format}),
    ("resize_as_", [empty(1).expand(3), empty(3)], {}, {"memory_format": torch.preserve_format}),
    *((name, [empty(2, 3, 3, 3)], {"output_size": [2] * rank}, {"output_size": [-1] * rank})
      for name, rank in (("adaptive_max_pool2d", 2), ("adaptive_max_pool3d", 3), ("_adaptive_avg_pool3d", 3))),
    *((name, [empty(2, 3, 3, 3)], {"output_size": [2] * rank, "kernel_size": [2] * rank}, wrong)
      for name, rank in (("fractional_max_pool2d", 2), ("fractional_max_pool3d.output", 3))
      for wrong in ({"output_size": [-1] * rank, "kernel_size": [2] * rank},
                    {"output_size": [2] * rank, "kernel_size": [-1] * rank},
                    {"output_size": [2] * rank, "kernel_size": [2**31] * rank})),
])
def test_a_kernel_that_does_not_compare_is_not_asked(
    name: str, args: Sequence[Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    ask(name, args, right)
    with pytest.raises(RuntimeError, match=SAID):
        ask(name, args[:1] if "dim" in wrong else args, wrong)
