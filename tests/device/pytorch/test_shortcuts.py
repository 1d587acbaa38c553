"""Functions that end in one operation are recorded at once from their second call on, as they were the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import djinn
from djinn.ir.tape import Node
from djinn.record.dispatcher import dispatcher
from djinn.session import runtime

REMOTE = "remote_accelerator:0"
Tensors = tuple[torch.Tensor, ...]
CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, w, b: x + y,
    "add a number": lambda x, y, w, b: x + 2,
    "add, scaled": lambda x, y, w, b: torch.add(x, y, alpha=0.5),
    "subtract from a number": lambda x, y, w, b: 1 - x,
    "multiply": lambda x, y, w, b: x * 0.5,
    "compare": lambda x, y, w, b: x > 0,
    "power": lambda x, y, w, b: x**2,
    "mm": lambda x, y, w, b: torch.mm(x, y),
    "addmm": lambda x, y, w, b: torch.addmm(b, x, w),
    "matmul": lambda x, y, w, b: x @ w,
    "linear": lambda x, y, w, b: F.linear(x, w, b),
    "layer_norm": lambda x, y, w, b: F.layer_norm(x, (8,), b, b),
    "layer_norm, another epsilon": lambda x, y, w, b: F.layer_norm(x, (8,), b, b, 0.5),
    "softmax": lambda x, y, w, b: F.softmax(x, -1),
    "softmax in another dtype": lambda x, y, w, b: torch.softmax(x, 0, dtype=torch.float64),
    "gelu": lambda x, y, w, b: F.gelu(x, approximate="tanh"),
    "cat": lambda x, y, w, b: torch.cat([x, y], dim=1),
    "stack": lambda x, y, w, b: torch.stack([x, y]),
    "sum": lambda x, y, w, b: x.sum(),
    "sum of rows": lambda x, y, w, b: x.sum(-1, keepdim=True),
    "mean": lambda x, y, w, b: x.mean(dim=0),
    "where": lambda x, y, w, b: torch.where(x > 0, x, y),
    "attention": lambda x, y, w, b: F.scaled_dot_product_attention(x[None], y[None], w[None]),
    "attention that looks back": lambda x, y, w, b: F.scaled_dot_product_attention(x[None], y[None], w[None],
                                                                                   is_causal=True),
    "attention of heads": lambda x, y, w, b: F.scaled_dot_product_attention(
        x.view(1, 2, 8, 4), y.view(1, 2, 8, 4), w.view(1, 2, 8, 4), is_causal=True),
    "into a destination": lambda x, y, w, b: torch.add(x, y, out=torch.zeros_like(x)),
}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    djinn.init(flush_every=None)
    yield
    djinn.shutdown()


@pytest.fixture
def operands() -> tuple[Tensors, Tensors]:
    torch.manual_seed(0)
    local = (torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(8))
    return local, tuple(tensor.to(REMOTE) for tensor in local)


def recorded(call: Callable[[], Any]) -> tuple[Any, list[Node]]:
    nodes: list[Node] = []
    stop = runtime.current().capture(nodes.append)
    try:
        return call(), nodes
    finally:
        stop()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_recorded_as_the_first_one(
    name: str, mode: Callable[[], Any], operands: tuple[Tensors, Tensors]
) -> None:
    local, remote = operands
    with mode():
        wanted = CALLS[name](*local)
        first, long_way = recorded(lambda: CALLS[name](*remote))
        for _ in range(2):
            got, nodes = recorded(lambda: CALLS[name](*remote))
            assert [(node.signature.template, list(node.numbers)) for node in nodes] == [
                (node.signature.template, list(node.numbers)) for node in long_way]
            assert got.is_inference() == first.is_inference() == wanted.is_inference()
            assert (got.shape, got.stride(), got.dtype, got.requires_grad) == (
                wanted.shape, wanted.stride(), wanted.dtype, wanted.requires_grad)
            assert torch.equal(got.cpu(), wanted)


def test_numbers_are_those_of_the_call(operands: tuple[Tensors, Tensors]) -> None:
    (x, y, *_), (remote_x, remote_y, *_) = operands
    with torch.no_grad():
        for scale in (0.5, 2.0, -1.0, 0.5, 3):
            assert torch.equal((remote_x * scale).cpu(), x * scale)
            assert torch.equal((remote_x * True).cpu(), x * True)
            assert torch.equal(torch.add(remote_x, remote_y, alpha=scale).cpu(), torch.add(x, y, alpha=scale))
        for epsilon in (1e-5, 0.5, 1e-5, 2.0):
            assert torch.equal(F.layer_norm(remote_x, (8,), eps=epsilon).cpu(), F.layer_norm(x, (8,), eps=epsilon))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_number_that_decides_which_operator_runs_is_looked_at_again(
    mode: Callable[[], Any], operands: tuple[Tensors, Tensors]
) -> None:
    local, remote = ([tensor.view(1, 2, 8, 4) for tensor in side[:3]] for side in operands)
    with mode():
        for probability in (0.0, 0.0, 0.1, 0.1, 0.0, 0.1):
            results = []
            for queries in (local, remote):
                torch.manual_seed(0)
                results.append(F.scaled_dot_product_attention(*queries, dropout_p=probability, is_causal=True))
            assert results[0].stride() == results[1].stride()
            assert torch.equal(results[1].cpu(), results[0])


def test_numbers_by_name_keep_their_names(operands: tuple[Tensors, Tensors]) -> None:
    (x, y, _, b), (remote_x, remote_y, _, remote_b) = operands
    with torch.no_grad():
        for alpha, beta in ((0.5, 0.5), (0.5, 2.0), (2.0, 0.5)):
            for names in ({"alpha": alpha, "beta": beta}, {"beta": beta, "alpha": alpha}):
                got = torch.addmm(remote_b, remote_x, remote_y, **names)
                assert torch.equal(got.cpu(), torch.addmm(b, x, y, **names))


def test_zeros_of_either_sign_and_nan_are_numbers_of_their_own(operands: tuple[Tensors, Tensors]) -> None:
    (x, *_), (remote, *_) = operands
    with torch.no_grad():
        for number in (0.0, -0.0, float("nan"), 0.0, float("nan"), -0.0, 1.0):
            for call in (torch.mul, torch.add, torch.div, torch.pow, lambda a, b: F.layer_norm(a, (8,), eps=abs(b))):
                torch.testing.assert_close(call(remote, number).cpu(), call(x, number), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(torch.signbit(torch.mul(remote, number).cpu()), torch.signbit(torch.mul(x, number)))


def test_a_repeated_call_does_not_pass_the_dispatcher(operands: tuple[Tensors, Tensors]) -> None:
    x, y = operands[1][:2]
    with torch.no_grad():
        assert x + y is not x + y
        before = runtime.current().recorder.dispatch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher, "dispatch", lambda *_: pytest.fail("dispatched"))
            made = x + y
        assert runtime.current().recorder.dispatch == before
    assert torch.equal(made.cpu(), operands[0][0] + operands[0][1])


def test_attention_is_carried_out_by_a_kernel_that_is_allowed(operands: tuple[Tensors, Tensors]) -> None:
    queries = [tensor.view(1, 2, 8, 4) for tensor in operands[1][:3]]

    def attended() -> list[str]:
        _, nodes = recorded(lambda: F.scaled_dot_product_attention(*queries))
        return [node.signature.template.operator for node in nodes]

    with torch.no_grad():
        for _ in range(3):
            assert attended() == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
        with sdpa_kernel(SDPBackend.MATH):
            assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in attended()
        assert attended() == ["aten::_scaled_dot_product_flash_attention_for_cpu"]


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_gradients_autocast_transforms_and_profilers_see_what_they_always_saw(
    operands: tuple[Tensors, Tensors]
) -> None:
    (x, y, *_), (remote_x, remote_y, *_) = operands
    with torch.no_grad():
        for _ in range(2):
            (remote_x @ remote_y) + remote_y
        with _Counting() as counting:
            remote_x + remote_y
        assert counting.seen == ["aten.add.Tensor"]
        with torch.autocast("remote_accelerator", dtype=torch.bfloat16):
            assert (remote_x @ remote_y).dtype == torch.bfloat16
        assert torch.equal(torch.func.vmap(torch.add)(remote_x, remote_y).cpu(), x + y)
        with torch.profiler.profile() as profile:
            remote_x + remote_y
        assert "aten::add" in {event.key for event in profile.key_averages()}
    wanted = x.clone().requires_grad_()
    got = remote_x.clone().requires_grad_()
    (wanted @ y + y).sum().backward()
    (got @ remote_y + remote_y).sum().backward()
    assert torch.equal(got.grad.cpu(), wanted.grad)
    tangent = torch.func.jvp(lambda t: t @ remote_y + remote_y, (remote_x,), (remote_x,))[1]
    assert torch.equal(tangent.cpu(), x @ y)


def test_another_session_learns_anew() -> None:
    with torch.no_grad():
        for _ in range(2):
            x = torch.ones(3, device=REMOTE)
            assert (x + x).tolist() == (x + x).tolist() == [2.0, 2.0, 2.0]
            djinn.init()
            with pytest.raises(djinn.DjinnError, match="session"):
                x + x
        djinn.shutdown()
        with pytest.raises(djinn.DjinnError):
            x + x


def test_what_is_forgotten_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinn_plugins.device.interceptor.fast_path.MAX_SHORTCUTS", 8)
    monkeypatch.setattr("djinn.record.recorder.MAX_PLANS", 8)
    with torch.no_grad():
        for _ in range(3):
            for size in range(1, 40):
                x = torch.ones(size, device=REMOTE)
                assert (x + x).shape == (size,)
                assert (x + x).sum().item() == 2 * size


def test_operations_that_are_sent_at_once_are_not_learned_wrongly() -> None:
    djinn.init(flush_every=1)
    with torch.no_grad():
        x = torch.ones(3, device=REMOTE)
        for _ in range(3):
            assert torch.stack([x, x], out=torch.zeros(2, 3, device=REMOTE)).tolist() == [[1.0] * 3] * 2
            assert (x + 1).tolist() == [2.0] * 3


def test_a_module_is_traced_twice_alike() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()).to(REMOTE)
    x = torch.ones(2, 3, device=REMOTE)
    assert torch.jit.trace(model, x)(x).tolist() == model(x).tolist()  # it compares a second trace with the first
