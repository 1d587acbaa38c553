"""Methods that lazy tensors have in Python behave as PyTorch's own methods do, whoever else takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import djinn
from djinn.record.tensor import LazyTensor

DEVICE = "remote_accelerator:0"

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "x + x": lambda x: x + x,
    "x - 2": lambda x: x - 2,
    "x * 0.5": lambda x: x * 0.5,
    "x / 3": lambda x: x / 3,
    "x @ x": lambda x: x @ x,
    "x[0]": lambda x: x[0],
    "x[..., 1:]": lambda x: x[..., 1:],
    "x.view(-1)": lambda x: x.view(-1),
    "x.reshape(2, 8)": lambda x: x.reshape(2, 8),
    "x.transpose(0, 1)": lambda x: x.transpose(0, 1),
    "x.split(2, dim=1)": lambda x: x.split(2, dim=1)[1],
    "x.t().contiguous()": lambda x: x.t().contiguous(),
}


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Other(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__, cls.__name__


class _Adds:
    def __radd__(self, other: object) -> str:
        return "added"


@pytest.mark.parametrize("name", CALLS)
def test_a_function_mode_sees_the_same_calls(name: str) -> None:
    seen: list[list[str]] = []
    for tensor in (torch.ones(4, 4), torch.ones(4, 4, device=DEVICE)):
        with torch.no_grad():
            for _ in range(3):
                CALLS[name](tensor)
            with _Seen() as mode:
                CALLS[name](tensor)
        seen.append(mode.functions)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_eager(name: str, *, grad: bool) -> None:
    local = torch.arange(16.0).view(4, 4).requires_grad_(grad)
    remote = local.detach().to(DEVICE).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            wanted, got = CALLS[name](local), CALLS[name](remote)
            assert (got.stride(), got.is_leaf) == (wanted.stride(), wanted.is_leaf)
            assert got._is_view() == wanted._is_view()
            assert torch.equal(got.detach().cpu(), wanted.detach())
    if grad:
        wanted.sum().backward()
        got.sum().backward()
        assert remote.grad is not None
        assert local.grad is not None
        assert torch.equal(remote.grad.cpu(), local.grad)


def test_a_tensor_is_no_list_of_tensors() -> None:
    outcomes = []
    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError) as raised:
            torch.ops.aten.unbind_copy.int_out(torch.tensor(1.0, device=device), 0, out=torch.empty(0, device=device))
        outcomes.append((raised.type, str(raised.value).partition(" but instead")[0]))
    assert outcomes[0] == outcomes[1]


def test_a_view_counts_the_writes_of_its_base() -> None:
    with torch.no_grad():
        x = torch.zeros(4, device=DEVICE)
        view = x.view(2, 2)
        view.add_(1)
    assert (x._version, view._version, view._base is x) == (1, 1, True)


def test_another_class_is_asked() -> None:
    x, other = torch.ones(2, device=DEVICE), torch.ones(2).as_subclass(_Other)
    assert (x + other) == ("add", "_Other")
    assert (x * other) == ("mul", "_Other")


def test_an_operand_that_pytorch_does_not_know_is_asked() -> None:
    x = torch.ones(2, device=DEVICE)
    assert x + _Adds() == "added"
    with pytest.raises(TypeError):
        x + "1"


@pytest.mark.parametrize("value", [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70])
def test_integers_beyond_64_bits_are_refused_as_by_eager(value: int) -> None:
    def outcome(x: torch.Tensor) -> Any:
        try:
            return (x + value).tolist()
        except (RuntimeError, OverflowError) as error:
            return type(error), str(error)

    with torch.no_grad():
        remote = torch.ones(2, device=DEVICE)
        for number in (1, 2, 3):
            remote + number
        assert outcome(remote) == outcome(torch.ones(2))


def test_dropout_that_drops_nothing_is_the_tensor_itself() -> None:
    x = torch.ones(2, device=DEVICE)
    djinn.reset_stats()
    assert functional.dropout(x, 0.5, training=False) is x
    assert torch.nn.Dropout(0.5).eval()(x) is x
    assert djinn.stats()["operations"] == 0
    with pytest.raises(ValueError, match="between 0 and 1"):
        functional.dropout(x, 1.5, training=False)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_tensor_without_elements_is_made_there(dtype: torch.dtype | None) -> None:
    local = torch.empty(3, 0, 2).transpose(0, 2)
    torch.ones(1, device=DEVICE).item()
    djinn.reset_stats()
    made = local.to(DEVICE, dtype=dtype)
    assert djinn.stats()["bytes_sent"] == 0
    wanted = local.to(dtype=dtype) if dtype else local
    assert type(made) is LazyTensor
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert torch.equal(made.cpu(), wanted)
    assert torch.cat([torch.tensor([], device=DEVICE), torch.ones(2, device=DEVICE)]).tolist() == [1, 1]
