"""What a server answers to a client whose descriptions of sparse tensors are lies.

PyTorch refuses such indices as well where it checks invariants.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE

import djinn
from djinn_plugins.common.sparse.forms import ConstantForm, DenseForm, SparseCall, SparseForm
from djinn_plugins.common.sparse.operators import define


def asked(kind: str, text: Any, *tensors: torch.Tensor) -> Any:
    """Run a description on the server, and fetch the first result."""
    define()
    given = [tensor.to(DEVICE) for tensor in tensors]
    made = getattr(torch.ops.djinn_sparse, kind).default(text if isinstance(text, str) else text.encoded(), given, [])
    return (made if isinstance(made, torch.Tensor) else made[0]).cpu()


def densified(
    layout: str, size: tuple[int, ...], *, is_coalesced: bool = False, name: str = "aten::_to_dense"
) -> SparseCall:
    return SparseCall(name, (SparseForm(layout, size, is_coalesced),))


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


ROW, ONES = whole(0, 1).view(1, 2), torch.ones(2)
LIES: dict[str, tuple[str, Any, tuple[torch.Tensor, ...], str]] = {
    "index beyond": ("dense", densified("coo", (2,)), (whole(0, 2).view(1, 2), ONES), "outside"),
    "index negative": ("dense", densified("coo", (2,)), (whole(-1, 0).view(1, 2), ONES), "outside"),
    "index further beyond": ("dense", densified("coo", (2,)), (whole(0, 3).view(1, 2), ONES), "outside"),
    "not sorted": ("dense", densified("coo", (2,), is_coalesced=True), (whole(1, 0).view(1, 2), ONES), "coalesced"),
    "twice": ("dense", densified("coo", (2,), is_coalesced=True), (whole(1, 1).view(1, 2), ONES), "coalesced"),
    "fewer values": ("dense", densified("coo", (2,)), (ROW, torch.ones(1)), "fit"),
    "wider values": ("dense", densified("coo", (2, 9)), (ROW, torch.ones(2, 3)), "fit"),
    "real indices": ("dense", densified("coo", (2,)), (ROW.float(), ONES), "integers"),
    "narrow indices": ("dense", densified("coo", (2,)), (ROW.int(), ONES), "dimensions"),
    "size overflows": ("dense", densified("coo", (2**40, 2**40)), (whole(0, 1, 0, 1).view(2, 2), ONES),
                       "overflows|would take"),
    "size negative": ("dense", densified("coo", (-2,)), (ROW, ONES), "overflows"),
    "row beyond": ("dense", densified("csr", (1, 2)), (whole(0, 3), whole(0, 1), ONES), "crow_indices"),
    "column beyond": ("dense", densified("csr", (1, 2)), (whole(0, 2), whole(0, 2), ONES), "col_indices"),
    "rows fall": ("dense", densified("csr", (3, 2)), (whole(0, 2, 1, 2), whole(0, 1), ONES), "crow_indices"),
    "operator of files": ("dense", SparseCall("aten::from_file", (ConstantForm("/etc/hostname"),)), (ONES,), "not run"),
    "operator unchecked": ("coo", densified("coo", (2,), name="aten::_sparse_coo_tensor_unsafe"), (ROW, ONES),
                           "not run"),
    "operator of others": ("dense", densified("coo", (2,), name="prims::neg"), (ROW, ONES), "not run"),
    "number for a dtype": ("coo", SparseCall("aten::_to_copy", (SparseForm("coo", (2,)),), {"dtype": ConstantForm(7)}),
                           (ROW, ONES), "takes"),
    "too few tensors": ("dense", SparseCall("aten::mm", (SparseForm("coo", (2,)), DenseForm())), (ROW, ONES),
                        "too few"),
    "too many tensors": ("dense", densified("coo", (2,)), (ROW, ONES, ONES), "too many"),
    "another result": ("coo", densified("coo", (2,)), (ROW, ONES), "layout"),
    "no description": ("dense", "{}", (ONES,), "describes no"),
    "a layout that is none": ("dense", densified("coz", (2,)), (ROW, ONES), "layout"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_and_the_worker_lives(name: str) -> None:
    kind, text, tensors, words = LIES[name]
    with pytest.raises((RuntimeError, djinn.DjinnError), match=words):
        asked(kind, text, *tensors)
    assert torch.equal(asked("dense", densified("coo", (2,)), ROW, ONES), ONES)


def test_a_small_tensor_that_would_be_terabytes_is_an_error_at_once() -> None:
    with pytest.raises((RuntimeError, djinn.DjinnError)):
        asked("dense", densified("coo", (2**20, 2**21)), whole(0, 1, 0, 1).view(2, 2), ONES)
    assert torch.equal(asked("dense", densified("coo", (2,)), ROW, ONES), ONES)
