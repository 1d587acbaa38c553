"""``torch.accelerator``, once the remote device is the accelerator of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.recording.eager import DEVICE
from torch.utils.data import DataLoader

from djinn_plugins.device.accelerator.availability import make_available


@pytest.fixture(autouse=True)
def _available() -> Iterator[None]:
    with make_available():
        yield


def test_the_remote_device_is_the_accelerator_only_while_it_is_available() -> None:
    def seen() -> tuple[object, ...]:
        return (str(torch.accelerator.current_accelerator()), torch.accelerator.is_available(),
                torch.accelerator.device_count(), torch.remote_accelerator.is_available())

    with make_available():
        assert seen() == (DEVICE.type, True, 1, True)
    assert seen() == (DEVICE.type, True, 1, True)
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device(DEVICE.type)


def test_it_trains_on_the_device_that_it_was_told() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    model = torch.nn.Linear(2, 1).to(found)
    model(torch.ones(1, 2, device=found)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_pinned_memory_is_told_apart_by_storage() -> None:
    plain = torch.arange(4.0)
    pinned = plain.pin_memory()
    view = pinned.view(2, 2)[1:]
    del pinned
    gc.collect()
    assert (plain.is_pinned(), view.is_pinned()) == (False, True)
    assert view.pin_memory().data_ptr() == view.data_ptr()
    assert view.tolist() == [[2.0, 3.0]]


def test_factories_make_pinned_memory() -> None:
    buffer = torch.empty(2, 2, pin_memory=True)
    buffer.copy_(torch.ones(2, 2, device=DEVICE), non_blocking=True)
    assert (buffer.is_pinned(), buffer.tolist()) == (True, [[1.0, 1.0], [1.0, 1.0]])
    assert torch.zeros_like(torch.ones(3), pin_memory=True).is_pinned()
    assert not torch.ones(3, pin_memory=False).is_pinned()
    with torch.device(DEVICE):
        assert torch.zeros(1).device == DEVICE
    with make_available():
        assert torch.randn(1, pin_memory=True).is_pinned()
    assert torch.full((1,), 2.0, pin_memory=True).is_pinned()


def test_what_backward_needs_can_wait_on_the_cpu() -> None:
    x = torch.tensor([1.0, 2.0], device=DEVICE, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=DEVICE.type):
        y = x.square().sum()
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_its_batches(workers: int) -> None:
    loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=workers, pin_memory=True)  # type: ignore[arg-type]  # has __getitem__ and __len__
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert all(batch.is_pinned() for batch in batches)
