"""Weak references to storages of remote tensors: equal for views, expired when the last view is gone."""

from __future__ import annotations

import copy
import io

import torch
from support.recording.eager import DEVICE
from torch.multiprocessing.reductions import StorageWeakRef

import djinn


def refer(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_views_have_one_storage_and_copies_have_another() -> None:
    x = torch.arange(6.0, device=DEVICE)
    assert refer(x) == refer(x[2:]) == refer(x.view(2, 3).t()) == refer(x.detach())
    assert hash(refer(x)) == hash(refer(x[:1]))
    assert refer(x) != refer(x.clone())
    assert refer(x) != refer(torch.arange(6.0))
    assert len({refer(item) for item in (x, x[1:], x + 1, x.mT if x.dim() > 1 else x)}) == 2


def test_it_expires_with_the_last_view_also_with_one_made_before_or_later() -> None:
    x = torch.arange(6.0, device=DEVICE)
    before = x.detach()
    reference = refer(x)
    assert not reference.expired()
    later = x.detach()
    del x
    assert not reference.expired()
    del before
    assert not reference.expired()
    assert later.sum().item() == 15
    del later
    assert reference.expired()
    assert reference.expired()


def test_one_reference_of_several_goes() -> None:
    x = torch.ones(2, device=DEVICE)
    first, second = refer(x), refer(x)
    del first
    assert not second.expired()
    third = StorageWeakRef.from_weakref(x.untyped_storage()._weak_ref())
    del x, second
    assert third.expired()


def test_storages_of_two_sessions_are_two() -> None:
    djinn.shutdown()
    old = torch.ones(2, device=DEVICE)
    djinn.shutdown()
    new = torch.ones(2, device=DEVICE)
    of_old, of_new = refer(old), refer(new)
    assert old.data_ptr() == new.data_ptr(), "each session numbers its storages from the beginning"
    assert of_old != of_new
    del new
    assert of_new.expired()
    assert not of_old.expired()
    del old
    assert of_old.expired()


def test_a_parameter_that_went_home_has_left_its_remote_storage() -> None:
    adopted = torch.nn.Linear(2, 2)
    for layer in (adopted.to(DEVICE), torch.nn.Linear(2, 2, device=DEVICE)):
        reference = refer(layer.weight)
        assert not reference.expired()
        layer.cpu()
        assert layer.weight.device.type == "cpu"
        assert reference.expired()


def test_what_is_saved_or_copied_does_not_show_it() -> None:
    x = torch.ones(2, device=DEVICE)
    reference = refer(x)
    written = io.BytesIO()
    torch.save(x, written)
    plain = io.BytesIO()
    torch.save(x.clone(), plain)
    assert len(written.getvalue()) == len(plain.getvalue())
    copied = copy.deepcopy(x)
    assert refer(copied) != reference
    del x
    assert reference.expired()


def test_ordinary_storages_are_referred_to_as_ever() -> None:
    x = torch.ones(2)
    reference = refer(x)
    assert not reference.expired()
    del x
    assert reference.expired()
