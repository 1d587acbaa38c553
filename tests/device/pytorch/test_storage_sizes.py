"""``resize_`` of storages: memory that a program frees, and allocates again for the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE
from torch.distributed.utils import _alloc_storage, _free_storage
from torch.multiprocessing.reductions import StorageWeakRef

from djinn.errors import UnsupportedTensorError

MIB = 2**20


def _used_mib() -> float:
    return torch.remote_accelerator.memory_allocated() / MIB  # type: ignore[attr-defined]  # made by djinn


def _outcome(device: str) -> list[Any]:
    """Free and allocate the memory of tensors that share it."""
    whole = torch.arange(12.0, device=device).reshape(3, 4)
    row, flipped, same = whole[1], whole.t(), whole.detach()
    storage, reference = whole.untyped_storage(), StorageWeakRef(whole.untyped_storage())
    found: list[Any] = [storage.size()]
    storage.resize_(0)
    found += [storage.nbytes(), row.untyped_storage().size(), whole.shape, whole.stride(), row.storage_offset()]
    row.untyped_storage().resize_(48)
    found += [storage.size(), whole.stride(), flipped.stride(), StorageWeakRef(whole.untyped_storage()) == reference]
    whole.copy_(torch.arange(12.0).reshape(3, 4) * 2)
    row.add_(1)
    found += [row.tolist(), same.tolist(), flipped[0].tolist(), whole._version]
    storage.resize_(64)
    return [*found, same.sum().item(), storage.size()]


def test_tensors_share_the_memory_that_is_allocated_again() -> None:
    assert _outcome(DEVICE) == _outcome("cpu")


def test_what_autograd_has_saved_is_in_the_memory_that_is_allocated_again() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3, device=DEVICE))
    x = torch.full((2, 3), 2.0, device=DEVICE, requires_grad=True)
    y = (x @ weight.t()).sum()
    storage = weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(36)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.fill_(5.0)
    y.backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.unique().tolist(), weight.grad.unique().tolist()) == ([15.0], [4.0])


def test_fsdp_frees_memory_of_the_server() -> None:
    flat = torch.ones(4 * MIB, device=DEVICE)
    parameters = [part.view(1024, 1024) for part in flat.split(MIB)]
    assert sum(part.sum() for part in parameters) == 4 * MIB
    before_mib = _used_mib()
    _free_storage(flat)
    _free_storage(flat)
    assert before_mib - _used_mib() == pytest.approx(16, abs=0.1)
    _alloc_storage(flat, flat.size())
    flat.fill_(3.0)
    assert [part.mean().item() for part in parameters] == [3.0] * 4
    assert before_mib - _used_mib() == pytest.approx(0, abs=0.1)


def _freed_in_backward(device: str) -> list[Any]:
    """Free memory wherever Python runs in a backward pass."""
    tensors = [torch.ones(4, device=device) for _ in range(4)]
    found: list[Any] = []

    def free(tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)
        found.append((tensor.untyped_storage().size(), tensor.shape))

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
            free(tensors[0])
            return gradients[0]

    def recomputed(tensor: torch.Tensor) -> torch.Tensor:
        if calls:
            free(tensors[1])
        calls.append(tensor)
        return tensor.sin()

    calls: list[torch.Tensor] = []
    leaf = torch.ones(4, device=device, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: free(tensors[2]))
    made = Identity.apply(torch.utils.checkpoint.checkpoint(recomputed, leaf, use_reentrant=False))  # type: ignore[no-untyped-call]  # untyped there
    made.register_hook(lambda _: free(tensors[3]))
    made.sum().backward()
    assert leaf.grad is not None
    return [*found, leaf.grad.tolist()]


def test_memory_is_freed_in_a_backward_pass() -> None:
    assert _freed_in_backward(DEVICE) == _freed_in_backward("cpu")


def test_a_size_that_holds_some_tensors_only_is_refused_and_changes_nothing() -> None:
    x = torch.arange(4.0, device=DEVICE)
    with pytest.raises(UnsupportedTensorError, match="tensors of more than 8 bytes cannot be resized"):
        x.untyped_storage().resize_(8)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
