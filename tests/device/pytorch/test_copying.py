"""Deep copies share what the originals share, and leave behind what eager leaves behind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = "remote_accelerator:0"


def _with_gradient(device: str) -> list[torch.Tensor]:
    leaf = torch.arange(4.0, device=device).requires_grad_()
    (leaf * 2).sum().backward()
    return [leaf]


def _module(device: str) -> torch.nn.Module:
    base, module = torch.arange(4.0, device=device), torch.nn.Module()
    module.first, module.second = torch.nn.Buffer(base[:2]), torch.nn.Buffer(base[1:])
    module.weight = module.tied = torch.nn.Parameter(base.clone())
    module.of_weight = torch.nn.Buffer(module.weight.data[1:])
    module.weight.grad, module.weight.label = torch.ones(4, device=device), "not kept"
    return module


_MAKERS: dict[str, Callable[[str], Any]] = {
    "view after base": lambda device: (base := torch.arange(6.0, device=device), base[1:3])[:2],
    "base after view": lambda device: (base := torch.arange(6.0, device=device)) is None or [base[1:5:2], base],
    "views alone": lambda device: (base := torch.arange(6.0, device=device)) is None or [base[:2], base[1:]],
    "no base is known": lambda device: [
        (base := torch.arange(6.0, device=device)).data[:2], base.data.reshape(2, 3).t()[1:]],
    "other dtypes": lambda device: [(base := torch.arange(6.0, device=device))[::2], base.view(torch.int16)[:4]],
    "within itself": lambda device: [torch.ones(1, device=device).expand(4)],
    "empty": lambda device: [(base := torch.zeros(0, 3, device=device)), base[:, :1]],
    "conjugated": lambda device: [torch.arange(3, device=device).to(torch.complex64).conj()],
    "storage": lambda device: [(base := torch.arange(6.0, device=device)).untyped_storage(), base[1:]],
    "gradient": _with_gradient,
    "module": _module,
}


def _tensors(copied: Any) -> list[torch.Tensor]:
    if isinstance(copied, torch.nn.Module):
        return [*copied.parameters(), *copied.buffers()]
    return [item for item in copied if isinstance(item, torch.Tensor)]


def _facts(tensors: list[torch.Tensor]) -> list[Any]:
    return [(item.tolist(), item.stride(), item.storage_offset(), item._is_view(), item.requires_grad, item.is_conj(),
             None if item.grad is None else item.grad.tolist(), hasattr(item, "label"))
            for item in tensors]


def _saved(item: Any) -> Any:
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file)


def _story(make: Callable[[str], Any], device: str) -> list[Any]:
    """Copy, then write into one tensor after another, and say what all of them are."""
    original = make(device)
    copied = _tensors(copy.deepcopy(original))
    story = [_facts(copied)]
    with torch.no_grad():
        for item in copied:
            if not (item.numel() > 1 and 0 in item.stride()):
                item.fill_(7)
                story.append(_facts(copied))
    return [*story, _facts(_tensors(original))]


@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
def test_deep_copies_are_those_of_eager(make: Callable[[str], Any]) -> None:
    assert _story(make, DEVICE) == _story(make, "cpu")


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda items: pickle.loads(pickle.dumps(items)), lambda items: [*map(_saved, items)],
], ids=["deepcopy", "pickle", "save"])
def test_copies_of_views_without_a_mark_have_the_values_of_conjugated_views(copied: Callable[[Any], Any]) -> None:
    def program(device: str) -> list[Any]:
        z = torch.tensor([1 + 2j, 3 - 1j, 5j], device=device)
        views = [z, z.conj()[1:], z.conj().imag, z[1:], z.conj().imag.detach(), z.conj()[1:].data]
        with torch.inference_mode():
            views.append(z.conj().imag)
        return [item.clone().tolist() for item in copied(views)]

    assert program(DEVICE) == program("cpu")
