"""Errors: what eager raises, where eager raises it, and never the end of the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.processes.warm import run_python
from torch import nn

import djinn

DEVICE = torch.device("remote_accelerator:0")

_WRONG: dict[str, Callable[[str], object]] = {
    "matmul": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "broadcast": lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
    "in_place": lambda d: torch.ones(2, device=d).add_(torch.ones(3, device=d)),
    "view": lambda d: torch.ones(4, device=d).view(3),
    "dim": lambda d: torch.ones(4, device=d).sum(3),
    "dtype": lambda d: torch.ones(2, device=d).index_select(0, torch.ones(1, device=d)).cpu(),
    "argument": lambda d: torch.ones(2, device=d).clamp(),
    "index": lambda d: torch.ones(2, device=d)[5],
    "linear": lambda d: nn.Linear(3, 2).to(d)(torch.ones(1, 4, device=d)),
    "embedding": lambda d: nn.Embedding(3, 2).to(d)(torch.tensor([7], device=d)).sum().item(),
    "item": lambda d: torch.ones(2, device=d).item(),
    "bool": lambda d: bool(torch.ones(2, device=d)),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)).sum().item(),
}


@pytest.mark.parametrize("name", sorted(_WRONG))
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_the_exception_is_eagers(name: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        with pytest.raises(Exception) as eager:
            _WRONG[name]("cpu")
        with pytest.raises(type(eager.value)) as remote:
            _WRONG[name]("remote_accelerator:0")
    assert type(remote.value) is type(eager.value)
    assert str(remote.value).split("\n")[0] == str(eager.value).split("\n")[0]


def test_a_wrong_shape_is_raised_at_the_users_line() -> None:
    a, b = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    with pytest.raises(RuntimeError) as caught:
        a @ b
    assert caught.traceback[0].lineno + 1 == test_a_wrong_shape_is_raised_at_the_users_line.__code__.co_firstlineno + 3
    assert torch.equal(a.cpu(), torch.ones(2, 3))


def test_a_failed_write_leaves_the_tensor_as_it_was() -> None:
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError):
        x.add_(torch.ones(3, device=DEVICE))
    assert x.tolist() == [1.0, 1.0]


def test_a_failure_at_run_time_names_the_operation_and_spares_the_rest() -> None:
    x = torch.ones(3, device=DEVICE)
    bad = nn.functional.embedding(torch.tensor([9], device=DEVICE), torch.ones(2, 2, device=DEVICE))
    worse = bad * 2
    good = x * 2
    with pytest.raises(IndexError) as caught:
        worse.sum().item()
    assert any("aten::embedding" in note for note in caught.value.__notes__)
    assert good.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(IndexError):
        bad.cpu()


def test_debug_mode_names_the_line_that_recorded_it() -> None:
    try:
        djinn.init(debug=True)
        index = torch.tensor([9], device=DEVICE)
        bad = nn.functional.embedding(index, torch.ones(2, 2, device=DEVICE))
        with pytest.raises(IndexError) as caught:
            bad.cpu()
        assert any("test_errors.py" in note for note in caught.value.__notes__)
    finally:
        djinn.init()


def test_an_unseen_failure_is_not_lost() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    x.index_fill_(0, torch.tensor([5], device=DEVICE), 1.0)
    with pytest.raises(IndexError):
        djinn.synchronize()
    assert x.sum().item() == 4.0


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad @ torch.ones(99, 99, device=grad.device)


def _raise(*_: object) -> None:
    raise KeyError("from a hook")


def _failing_backward(kind: str) -> Callable[[], object]:
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    y = x @ x
    if kind == "operation":
        return _WrongGradient.apply(y).sum().backward
    if kind == "tensor_hook":
        y.register_hook(_raise)
    elif kind == "accumulated_hook":
        x.register_post_accumulate_grad_hook(_raise)
    elif kind == "node_hook":
        y.grad_fn.register_hook(_raise)
    elif kind == "unpack":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _raise):
            y = x @ x
    loss = y.sum()
    if kind == "autograd_grad":
        y.register_hook(_raise)
        return lambda: torch.autograd.grad(loss, x)
    return loss.backward


@pytest.mark.parametrize("kind", ["operation", "tensor_hook", "accumulated_hook", "node_hook", "unpack"])
def test_an_exception_in_backward_reaches_the_caller(kind: str) -> None:
    backward = _failing_backward(kind)
    with pytest.raises(RuntimeError if kind == "operation" else KeyError):
        backward()
    x = torch.ones(2, 2, device=DEVICE, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_an_exception_in_autograd_grad_reaches_the_caller() -> None:
    x = torch.ones(2, 2, device=DEVICE, requires_grad=True)
    y = x @ x
    y.register_hook(_raise)
    with pytest.raises(KeyError, match="from a hook"):
        torch.autograd.grad(y.sum(), x)


def test_in_place_modification_is_noticed_as_in_eager() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_tensor_of_an_ended_session_says_so() -> None:
    x = torch.ones(1, device=DEVICE)
    djinn.init()
    for use in (lambda: x + 1, x.cpu, x.item, lambda: torch.cat([x, torch.ones(1, device=DEVICE)])):
        with pytest.raises(djinn.SessionClosedError, match="session that has ended"):
            use()
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2.0, 2.0]


def test_keyboard_interrupt_in_backward_does_not_abort() -> None:
    script = """
import torch, djinn
x = torch.ones(2, 2, device="remote_accelerator:0", requires_grad=True)
def hook(grad):
    raise KeyboardInterrupt
y = x @ x
y.register_hook(hook)
try:
    y.sum().backward()
except KeyboardInterrupt:
    print("interrupted")
"""
    done = run_python(script)
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted"), done.stderr
