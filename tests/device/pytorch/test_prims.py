"""Operators of torch._prims and torch._refs run by way of ATen's, so that servers run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._prims as prims
import torch._refs as refs
from support.recording.eager import assert_same, outcome

import djinn

REMOTE = "remote_accelerator:0"
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sin": prims.sin,
    "add": lambda x: prims.add(x, x),
    "broadcast_in_dim": lambda x: prims.broadcast_in_dim(x, (4, 2, 3), (1, 2)),
    "convert_element_type": lambda x: prims.convert_element_type(x, torch.int32),
    "sum": lambda x: prims.sum(x, (0,)),
    "var": lambda x: prims.var(x, (1,), 0),
    "transpose": lambda x: prims.transpose(x, (1, 0)),
    "as_strided": lambda x: prims.as_strided(x, (2,), (1,), 1),
    "where": lambda x: prims.where(x > 2, x, -x),
    "copy_to": lambda x: prims.copy_to(x.clone(), x + 1),
    "view_of, written to": lambda x: prims.view_of(x).add_(1).sum() + x.sum(),
    "item": lambda x: prims.item(x[1, 1]),
    "svd": lambda x: prims.svd(x, full_matrices=False)[1],
    "fft_r2c": lambda x: prims.fft_r2c(x, dim=(1,), onesided=True),
    "wrong shapes": lambda x: prims.add(x, x[:1]),
    "wrong dtypes": lambda x: prims.add(x, x.double()),
    "refs.softmax": lambda x: refs.softmax(x, 1),
    "refs.native_layer_norm": lambda x: refs.native_layer_norm(x, [3], None, None, 1e-5)[0],
    "refs.roll": lambda x: refs.roll(x, 1, 0),
    "refs.std": refs.std,
    "refs.add into out": lambda x: refs.add(x, x, out=torch.empty_like(x)),
    "refs.add_ of another shape": lambda x: refs.add_(x, torch.ones(2, 2, device=x.device)),
}


@pytest.fixture(params=["in_process", "served"], autouse=True, scope="module")
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    djinn.init(server=request.getfixturevalue("server").address if request.param == "served" else "")
    yield
    djinn.shutdown()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_they_give_what_eager_gives(call: str) -> None:
    assert_same(lambda device: outcome(lambda: CALLS[call](torch.arange(6.0).reshape(2, 3).to(device))))
