"""Constructors of storages, copies of numbers and of complex tensors, complex ranges, meta tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE


def test_storages_can_be_constructed() -> None:
    made = torch.UntypedStorage(4, device=DEVICE)
    assert (made.device, made.nbytes(), made.tolist()) == (DEVICE, 4, [0, 0, 0, 0])
    assert torch.UntypedStorage([1, 2, 3], device=DEVICE).tolist() == [1, 2, 3]
    assert torch.UntypedStorage(device=DEVICE).nbytes() == 0
    tensor = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(made)
    tensor.fill_(7)
    assert made.tolist() == [7, 7, 7, 7]
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.UntypedStorage(4, device="remote_accelerator:9")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_typed_storages_can_be_constructed() -> None:
    made = torch.TypedStorage([1, 2.5], device=DEVICE, dtype=torch.float32)
    assert (made.device, made.tolist()) == (DEVICE, [1.0, 2.5])
    assert torch.TypedStorage(3, device=DEVICE, dtype=torch.int64).nbytes() == 24


def test_ordinary_storages_are_as_before() -> None:
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]
    assert torch.UntypedStorage(3, device="meta").device.type == "meta"
    assert torch.UntypedStorage().nbytes() == 0
    assert type(torch.ones(2).untyped_storage()) is torch.UntypedStorage
    with pytest.raises(TypeError):
        torch.UntypedStorage(1, 2, 3)


@pytest.mark.parametrize("number", [3.5, -2, True, 1 + 2j])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.complex64])
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_a_number_can_be_copied_into_a_tensor(number: Any, dtype: torch.dtype) -> None:
    local, remote = torch.zeros(2, 2, dtype=dtype), torch.zeros(2, 2, dtype=dtype, device=DEVICE)
    assert remote.copy_(number) is remote
    assert torch.equal(remote.cpu(), local.copy_(number))


@pytest.mark.parametrize("make", [
    lambda device: torch.linspace(1j, 2j, steps=5, device=device),
    lambda device: torch.logspace(1, 2j, steps=3, device=device),
    lambda device: torch.linspace(torch.tensor(1j, device=device), 2, steps=4, device=device),
    lambda device: torch.linspace(0, 1, steps=4, device=device),
    lambda device: torch.linspace(1j, 2j, steps=5, dtype=torch.complex128, device=device),
], ids=["linspace", "logspace", "tensor", "real", "typed"])
def test_ranges_between_complex_numbers_are_complex(make: Callable[[Any], torch.Tensor]) -> None:
    want, made = make("cpu"), make(DEVICE)
    assert made.dtype == want.dtype
    assert torch.equal(made.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32, torch.float8_e5m2])
def test_a_shallow_copy_shares_its_storage(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=torch.float32, device=DEVICE).to(dtype)
    tensor.tag = ["kept"]  # type: ignore[attr-defined]  # any attribute
    made = copy.copy(tensor)
    assert made.device == DEVICE
    assert made is not tensor
    assert made.tag is tensor.tag  # type: ignore[attr-defined]  # as above
    made.fill_(2)
    assert torch.equal(tensor.cpu().float() if not dtype.is_complex else tensor.cpu(), 2 * torch.ones(3))


def test_a_shallow_copy_of_a_parameter_is_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=DEVICE, dtype=torch.complex64), requires_grad=False)
    made = copy.copy(parameter)
    assert isinstance(made, torch.nn.Parameter)
    assert (made.requires_grad, made.device) == (False, DEVICE)
    assert copy.copy(torch.ones(1, device=DEVICE, requires_grad=True)).requires_grad


@pytest.mark.parametrize("call", [
    lambda x, meta: x + meta,
    lambda x, meta: meta @ x,
    torch.nn.functional.linear,
    lambda x, meta: torch.cat([x, meta]),
], ids=["add", "matmul", "linear", "cat"])
def test_meta_tensors_are_refused_beside_remote_ones(call: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="device meta is not on the expected device"):
        call(torch.ones(2, 2, device=DEVICE), torch.ones(2, 2, device="meta"))


def test_a_copy_to_meta_only_has_metadata() -> None:
    target = torch.ones(2, 2, device="meta")
    assert target.copy_(torch.ones(2, 2, device=DEVICE)) is target
