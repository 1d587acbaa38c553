"""DataLoaders that feed the remote accelerator."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import djinn
from djinn import LazyTensor
from djinn.errors import UnsupportedTensorError

PINNED = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


class Remote(Dataset[torch.Tensor]):
    """Makes its items on the remote accelerator, in whatever process that is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device=DEVICE)


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12))


def _train(device: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(1)
    for _ in range(2):
        for x, y in DataLoader(_data(), batch_size=5, shuffle=True, generator=order, **settings):
            optimizer.zero_grad()
            (model(x.to(device, non_blocking=True)).squeeze(1) - y.to(device)).pow(2).mean().backward()
            optimizer.step()
    return model.weight.detach().cpu()


@PINNED
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_from_a_loader_is_that_of_eager(workers: int, *, pin_memory: bool) -> None:
    settings = {"num_workers": workers, "pin_memory": pin_memory}
    assert torch.equal(_train(DEVICE, **settings), _train("cpu", **settings))


def test_remote_tensors_are_collated_in_this_process() -> None:
    batches = list(DataLoader(Remote(), batch_size=2))
    assert all(isinstance(batch, LazyTensor) for batch in batches)
    assert [batch.tolist() for batch in batches] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    data = TensorDataset(*(tensor.to(DEVICE) for tensor in _data().tensors))
    x, y = next(iter(DataLoader(data, batch_size=4)))
    assert torch.equal(x.cpu(), _data().tensors[0][:4])
    assert y.tolist() == [0, 1, 2, 3]


def test_a_function_that_collates_may_move_batches() -> None:
    def collate(items: list[Any]) -> torch.Tensor:
        return torch.stack([x for x, _ in items]).to(DEVICE)

    batches = list(DataLoader(_data(), batch_size=6, collate_fn=collate))
    assert torch.equal(torch.cat(batches).cpu(), _data().tensors[0])


def _assert_refused(data: Dataset[Any], workers: int, method: str) -> None:
    iterator: Any = iter(DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=method))
    try:
        with pytest.raises(UnsupportedTensorError, match="Workers of a DataLoader cannot use remote tensors"):
            next(iterator)
    finally:
        # The exception and the iterator hold each other; whenever they are collected, workers would be waited for.
        iterator._shutdown_workers()


FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")


@FORK
@pytest.mark.parametrize("used_before", [False, True])
def test_a_worker_that_makes_remote_tensors_says_so(*, used_before: bool) -> None:
    djinn.shutdown()
    if used_before:
        torch.ones(2, device=DEVICE).sum().item()
    _assert_refused(Remote(), 2, "fork")
    assert torch.ones(2, device=DEVICE).sum().item() == 2.0


@FORK
def test_a_worker_that_is_given_remote_tensors_says_so() -> None:
    _assert_refused(TensorDataset(torch.ones(4, 2, device=DEVICE)), 1, "fork")


def test_a_worker_that_is_spawned_says_so_too() -> None:
    _assert_refused(Remote(), 1, "spawn")
