"""Laws of run modes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional
from hypothesis import given
from hypothesis import strategies as st

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.run.kinds import RunContext, RunMode

_OWNERS: tuple[Any, ...] = (
    torch, torch.accelerator, torch.amp, torch.autograd, torch.backends, torch.cuda, torch.cuda.amp, torch.jit,
    torch.nn.functional, torch.random, torch.Tensor, torch.nn.Module, torch.Generator, torch.autocast)
_VALUES = st.lists(st.integers(-100, 100).map(float), min_size=1, max_size=8)
_RAISED = (ValueError, SystemExit, KeyboardInterrupt)


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    runtime.shutdown()
    yield
    runtime.shutdown()


def _context() -> RunContext:
    return RunContext(devices.logical_device())


def _state() -> dict[str, Any]:
    """Describe the process, as far as a mode may change it. Modules that are imported later are no change."""
    modules = dict(sys.modules)
    state: dict[str, Any] = {f"variable {name}": value for name, value in os.environ.items()}
    for owner in _OWNERS:
        for name, value in vars(owner).items():
            if not isinstance(value, ModuleType) and name not in ("__warningregistry__", "__annotations__"):
                state[f"{owner.__name__}.{name}"] = id(value)
    state |= {f"module {name}": id(module) for name, module in modules.items()}
    state |= {"import hooks": list(map(id, sys.meta_path)), "sys.excepthook": sys.excepthook,
              "sys.path": list(sys.path), "sys.argv": list(sys.argv),
              "default device": torch.get_default_device(), "default dtype": torch.get_default_dtype(),
              "modes of functions": torch._C._len_torch_function_stack(),
              "torch.cuda.is_available()": torch.cuda.is_available(),
              "torch.accelerator.is_available()": torch.accelerator.is_available()}
    return state


def _expect_unchanged(before: dict[str, Any], subject: Subject) -> None:
    after = _state()
    for name, value in before.items():
        expect_equal(after.get(name), value, f"{name} afterwards", str(subject))
    new = [name for name in after.keys() - before.keys() if not name.startswith("module ")]
    expect_equal(sorted(new), [], "variables and attributes that are new afterwards", str(subject))


@law("mode.described")
def test_described(subject: Subject, plugin: RunMode) -> None:
    """Read its help, and parse the name of its device within it."""
    expect(bool(plugin.help.strip()) and "\n" not in plugin.help and not plugin.help.endswith("."), "the help",
           got=plugin.help, wanted="one line without a full stop", where=str(subject))
    with plugin.enter(_context()):
        try:
            torch.device(plugin.device)
        except RuntimeError as error:
            raise AssertionError(f"device {plugin.device!r}: got {error}, should be a device [{subject}]") from error


@law("mode.taken_back")
def test_taken_back(subject: Subject, plugin: RunMode) -> None:
    """Compare the process before and afterwards. The first time, what a mode needs may be imported."""
    with plugin.enter(_context()):
        pass
    before = _state()
    with plugin.enter(_context()):
        torch.ones(2, device=plugin.device).sum().item()
    runtime.shutdown()
    _expect_unchanged(before, subject)


@law("mode.exceptions_pass")
@pytest.mark.parametrize("kind", _RAISED)
def test_exceptions_pass(subject: Subject, plugin: RunMode, kind: type[BaseException]) -> None:
    """Raise an exception within the mode."""
    with plugin.enter(_context()):
        pass
    before = _state()
    raised, caught = kind("7"), None
    try:
        with plugin.enter(_context()):
            raise raised
    except BaseException as error:  # noqa: BLE001  # whatever arrives is compared
        caught = error
    expect(caught is raised, "what leaves the mode", got=caught, wanted=f"{raised!r}, the same object",
           where=str(subject))
    _expect_unchanged(before, subject)


_ON_CPU: tuple[Callable[[list[float]], torch.Tensor], ...] = (
    torch.tensor,
    lambda values: torch.tensor(values, device="cpu") * 2,
    lambda values: torch.tensor(values).to("cpu").add_(1),
    lambda values: torch.zeros(len(values), device=torch.device("cpu")) + torch.tensor(values).cpu(),
    lambda values: torch.nn.functional.relu(torch.tensor(values)).sum(),
)


@law("mode.cpu_unchanged")
@given(values=_VALUES)
def test_cpu_unchanged(subject: Subject, plugin: RunMode, values: list[float]) -> None:
    """Compute the same on the CPU outside of the mode and within."""
    wanted = [make(values) for make in _ON_CPU]
    with plugin.enter(_context()):
        got = [make(values) for make in _ON_CPU]
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        expect_equal(type(one), torch.Tensor, f"type of tensor {index}", str(subject))
        expect_equal(str(one.device), "cpu", f"device of tensor {index}", str(subject))
        expect_same_tensor(one, other, f"tensor {index}", str(subject))
    expect_equal(runtime.is_initialized(), False, "a running session", str(subject))


@law("mode.device_is_remote")
@given(values=_VALUES)
def test_device_is_remote(subject: Subject, plugin: RunMode, values: list[float]) -> None:
    """Make tensors on the device, move some there, and compute; twice."""
    weight, ordinary = torch.tensor([[2.0], [3.0]]), torch.tensor(values)
    wanted = torch.nn.functional.linear(ordinary.unsqueeze(1), weight)
    for time in ("first", "second"):
        with plugin.enter(_context()):
            layer = torch.nn.Linear(1, 2, bias=False)
            with torch.no_grad():
                layer.weight.copy_(weight)
            layer.to(plugin.device)
            made = torch.tensor(values, device=plugin.device)
            moved = ordinary.to(plugin.device)
            results = [layer(made.unsqueeze(1)).detach(), layer(moved.unsqueeze(1)).detach()]
            where = f"{subject}, entered for the {time} time"
            for result in (made, moved, *results):
                expect(isinstance(result, LazyTensor), "a tensor on the device", got=type(result).__name__,
                       wanted="a LazyTensor of the session", where=where)
            homes = [result.cpu() for result in results]
        for home in homes:
            expect_same_tensor(home, wanted, "the result", where)


@law("mode.starts_no_session")
def test_starts_no_session(subject: Subject, plugin: RunMode) -> None:
    """Enter the mode and leave it."""
    with plugin.enter(_context()):
        expect_equal(runtime.is_initialized(), False, "a running session within the mode", str(subject))
    expect_equal(runtime.is_initialized(), False, "a running session afterwards", str(subject))
