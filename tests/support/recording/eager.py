"""Runs a program on local PyTorch and on the remote accelerator, and compares all that a user can see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import torch

import djinn

DEVICE = torch.device("remote_accelerator:0")
Program: TypeAlias = Callable[[str], Any]
"""Works on tensors of the device that it is given, and returns all that is to be compared."""


def outcome(action: Callable[[], Any]) -> Any:
    """What an action gives; for an exception, its class and the first words of its message."""
    try:
        return action()
    except Exception as error:
        return f"raised {type(error).__name__}: {' '.join(str(error).split()[:4])}"


def values(tensor: torch.Tensor) -> Any:
    """Return a tensor's data as lists: errors that only data shows come here."""
    return tensor.tolist()


def assert_same(program: Program, *, seed: int = 0) -> Any:
    """Run ``program`` on both sides with the same seed, compare, and return the remote results.

    What a program raises is raised; exceptions that are to be compared go through `outcome`.
    """
    torch.manual_seed(seed)
    expected = program("cpu")
    torch.manual_seed(seed)
    found = program("remote_accelerator:0")
    lazy: list[torch.Tensor] = []
    _pair(expected, found, "result", lazy)
    homes = djinn.materialize(*lazy) if len(lazy) != 1 else [djinn.materialize(lazy[0])]
    _compare(expected, found, "result", iter(homes))
    return found


def _pair(expected: Any, found: Any, where: str, lazy: list[torch.Tensor]) -> None:
    """Compare what is known without data, and list the lazy tensors."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {found!r} for a tensor"
        for name in ("shape", "dtype", "layout", "requires_grad", "is_leaf", "ndim"):
            _assert_equal(getattr(expected, name), getattr(found, name), f"{where}.{name}")
        for name in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
            if name not in ("stride", "storage_offset") or expected.layout is torch.strided:
                _assert_equal(getattr(expected, name)(), getattr(found, name)(), f"{where}.{name}()")
        _assert_equal(isinstance(expected, torch.nn.Parameter), isinstance(found, torch.nn.Parameter), f"{where}: kind")
        if isinstance(found, djinn.LazyTensor):
            lazy.append(found)
        return
    _assert_equal(_kind(expected), _kind(found), f"{where}: type")
    for key, mine, theirs in _members(expected, found, where):
        _pair(mine, theirs, f"{where}{key}", lazy)


def _compare(expected: Any, found: Any, where: str, homes: Any) -> None:
    if isinstance(expected, torch.Tensor):
        here = next(homes) if isinstance(found, djinn.LazyTensor) else found
        torch.testing.assert_close(
            here.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")
        return
    members = list(_members(expected, found, where))
    if not members and not isinstance(expected, (Mapping, list, tuple)):
        _assert_equal(expected, found, where)
    for key, mine, theirs in members:
        _compare(mine, theirs, f"{where}{key}", homes)


def _members(expected: Any, found: Any, where: str) -> list[tuple[str, Any, Any]]:
    if isinstance(expected, Mapping):
        _assert_equal(list(expected), list(found), f"{where}: keys")
        return [(f"[{key!r}]", expected[key], found[key]) for key in expected]
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        _assert_equal(len(expected), len(found), f"{where}: length")
        return [(f"[{i}]", mine, theirs) for i, (mine, theirs) in enumerate(zip(expected, found, strict=True))]
    return []


def _kind(value: Any) -> str:
    """Name of a value's class; tuples of results that come home together count as the tuples that they are."""
    kind = tuple if type(value) is djinn.LazyTuple else value.__class__
    return f"{kind.__module__}.{kind.__qualname__}"


def _assert_equal(expected: Any, found: Any, what: str) -> None:
    assert expected == found or repr(expected) == repr(found) == "nan", f"{what}: {found!r}, eager: {expected!r}"


def programs(*given: Program) -> pytest.MarkDecorator:
    """Parametrize a test over programs, each named after its function."""
    return pytest.mark.parametrize("program", given, ids=[_name(program) for program in given])


def _name(program: Program) -> str:
    if isinstance(program, functools.partial):
        return "-".join([_name(program.func), *map(str, program.args), *map(str, program.keywords.values())])
    return program.__name__.strip("_")
