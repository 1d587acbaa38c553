"""Operations with several results: lazy, in eager's own types, and brought home alone or together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, assert_same

import djinn

OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "split": lambda x: x.split(2),
    "split_sizes": lambda x: x.split([1, 3], dim=1),
    "torch_split": lambda x: torch.split(x, 2, dim=1),
    "split_with_sizes": lambda x: torch.split_with_sizes(x, [1, 3]),
    "chunk": lambda x: x.chunk(3),
    "tensor_split": lambda x: torch.tensor_split(x, 3),
    "unsafe_split": lambda x: x.unsafe_split(2),
    "hsplit": lambda x: x.hsplit(2),
    "vsplit": lambda x: x.vsplit(2),
    "unbind": lambda x: x.unbind(1),
    "iteration": list,
    "topk": lambda x: x.topk(2),
    "torch_topk": lambda x: torch.topk(x, 2, largest=False, sorted=True),
    "sort": lambda x: x.sort(descending=True),
    "stable_sort": lambda x: torch.sort(x, stable=True, dim=0),
    "msort": torch.msort,
    "max": lambda x: x.max(dim=1),
    "min": lambda x: x.min(1, keepdim=True),
    "median": lambda x: x.median(0),
    "nanmedian": lambda x: x.nanmedian(0),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(2),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(0),
    "aminmax": lambda x: x.aminmax(dim=0),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "qr": torch.linalg.qr,
    "svd": torch.linalg.svd,
    "eigh": lambda x: torch.linalg.eigh(x @ x.T),
    "slogdet": torch.linalg.slogdet,
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x @ x.T + 4 * torch.eye(4).to(x.device)),
    "inv_ex": torch.linalg.inv_ex,
    "frexp": torch.frexp,
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0]),
    "atleast_1d": lambda x: torch.atleast_1d(x, x[0]),
    "histogram": lambda x: torch.histc(x, 4),
    "where": lambda x: torch.where(x > 0),
    "nonzero_tuple": lambda x: x.nonzero(as_tuple=True),
    "unique": lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.round(), return_counts=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.0, train=True),
    "foreach": lambda x: torch._foreach_add([x, x[0]], 1),
    "max_pool": lambda x: torch.nn.functional.max_pool1d(x, 2, return_indices=True),
    "attention": lambda x: torch.nn.MultiheadAttention(4, 2).to(x.device)(x, x, x),
}


def _input(device: str) -> torch.Tensor:
    return torch.randn(4, 4).to(device)


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_the_type_of_eager(name: str) -> None:
    def program(device: str) -> Any:
        x = _input(device)
        torch.manual_seed(1)
        return OPERATIONS[name](x)

    found = assert_same(program)
    members = found if isinstance(found, (list, tuple)) else [found]
    assert all(isinstance(member, djinn.LazyTensor) for member in members)


LAZILY = ("split", "split_sizes", "chunk", "tensor_split", "unbind", "topk", "sort", "max", "min", "median", "cummax",
          "aminmax", "var_mean", "qr")


@pytest.mark.parametrize("name", LAZILY)
def test_one_result_comes_home_alone_and_all_in_one_round_trip(name: str) -> None:
    x = _input(str(DEVICE))
    djinn.materialize(*OPERATIONS[name](x))
    djinn.synchronize()
    djinn.reset_stats()
    results = OPERATIONS[name](x)
    assert isinstance(results, tuple)
    assert djinn.stats()["round_trips"] == 0
    first = results[0].cpu()
    one = djinn.stats()
    assert (one["round_trips"], one["materializations"]) == (1, 1)
    djinn.reset_stats()
    homes = djinn.materialize(*results)
    assert djinn.stats()["round_trips"] == 1
    assert torch.equal(homes[0], first)
    djinn.reset_stats()
    assert [home.tolist() for home in djinn.LazyTuple(results).materialize()] == [home.tolist() for home in homes]
    assert djinn.stats()["round_trips"] == 1


def test_named_results_are_named() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0]], device=DEVICE)
    top = x.topk(2)
    assert isinstance(top, torch.return_types.topk)
    assert top.__class__ is torch.return_types.topk
    assert isinstance(top, djinn.LazyTuple)
    assert [home.tolist() for home in top.materialize()] == [[[3.0, 2.0]], [[0, 2]]]
    assert repr(top) == repr(torch.return_types.topk(tuple(top)))
    assert type(torch.utils._pytree.tree_map(torch.Tensor.cpu, top)) is torch.return_types.topk
    assert top.values is top[0]
    assert top.indices is top[1]
    values, indices = top
    assert (values.tolist(), indices.tolist()) == ([[3.0, 2.0]], [[0, 2]])
    assert isinstance(top, tuple)
    assert repr(x.max(1)) == (
        "torch.return_types.max(\nvalues=tensor([3.], device='remote_accelerator:0'),\n"
        "indices=tensor([0], device='remote_accelerator:0'))")

def test_results_into_given_tensors_are_named_and_are_those() -> None:
    def program(device: str) -> Any:
        x = torch.tensor([[3.0, 1.0, 2.0]], device=device)
        into = (torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device))
        made = torch.sort(x, out=into)
        return made, made.values is into[0], into

    assert_same(program)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("wanted", [*itertools.product((False, True), repeat=3)])
def test_results_that_nobody_asked_for_are_none(
    request: pytest.FixtureRequest, wanted: tuple[bool, ...], here: bool
) -> None:
    if here:
        request.getfixturevalue("in_process")

    def program(device: str) -> Any:
        aten, data = torch.ops.aten, torch.arange(12.0, device=device).view(1, 3, 4)
        channel, packed = torch.ones(3, device=device), torch.ones(12, 4, device=device)
        norm = (channel, channel, channel, channel, channel, True, 1e-5, wanted)
        whole = torch.ones(4, 4, device=device), torch.ones(4, device=device)
        found = [
            *aten.native_batch_norm_backward(data, data, *norm),
            *aten.batch_norm_backward(data, data, *norm, channel),
            *aten.convolution_backward(
                data, data, channel.view(3, 1, 1), [3], [1], [0], [1], False, [0], 3, wanted),
            *torch._native_multi_head_attention(
                data, data, data, 4, 2, packed, packed.view(-1)[:12], *whole, None, need_weights=wanted[0]),
        ]
        assert "None" in repr(found) or all(wanted)
        return found

    assert_same(program)


def test_one_result_alone_travels(server: Any) -> None:
    try:
        djinn.init(server.address)
        x = torch.randn(2, 4096, device=DEVICE)
        results = x.split(1)
        djinn.synchronize()
        djinn.reset_stats()
        first = results[0].cpu()
        assert first.nbytes <= djinn.stats()["bytes_received"] < first.nbytes + 500
    finally:
        djinn.init()


def test_only_what_is_read_of_a_split_is_computed() -> None:
    try:
        djinn.init(flush_every=None)
        x = torch.arange(8.0, device=DEVICE)
        first, second = (x + 1).split(4)
        wanted, other = first * 2, second * 3
        assert wanted.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert "aten::mul" in other.operation
        assert djinn.stats()["pending_nodes"] == 1
    finally:
        djinn.init()
