"""Operators that a program defines in Python: a server that does not know them runs what they consist of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.recording.eager import DEVICE, assert_same, outcome

import djinn


@torch.library.custom_op("test_custom_operators::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.sin(x) * factor


@scaled_sine.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


scaled_sine.register_autograd(lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.factor, None),
                              setup_context=_keep)


@torch.library.custom_op("test_custom_operators::fill", mutates_args={"x"}, device_types=("cpu", "cuda"))
def fill(x: torch.Tensor, value: float) -> None:
    x.copy_(torch.full_like(x, value))


@torch.library.custom_op("test_custom_operators::numpy_sum", mutates_args=())
def numpy_sum(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x.cpu().numpy() + other.cpu().numpy())).to(x.device)


@torch.library.custom_op("test_custom_operators::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


def program(device: str) -> Any:
    x = torch.linspace(0, 1, 4, device=device).requires_grad_()
    pending = x.detach() + 1
    y = scaled_sine(x, 2.0)
    y.sum().backward()
    written = torch.ones(3, device=device)
    fill(written[1:], 5.0)
    return x, x.grad, pending, y, written, numpy_sum(pending, torch.ones(4)), outcome(lambda: refuse(pending))


def test_operators_defined_in_python_give_what_eager_gives() -> None:
    assert_same(program)


def test_kernels_for_cuda_that_are_written_in_python_run_here() -> None:
    with torch.library._scoped_library("test_custom_kernels", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("fill(Tensor(a!) x, float value) -> ()")
        library.impl("twice", lambda x: x * 2, "CUDA")
        library.impl("fill", lambda x, value: x.copy_(torch.full_like(x, value)) and None, "CUDA")
        x = torch.ones(2, device=DEVICE)
        torch.ops.test_custom_kernels.fill(x[1:], 5.0)
        assert torch.ops.test_custom_kernels.twice(x).tolist() == [2.0, 10.0]


def test_an_executor_in_this_process_needs_no_kernel_for_the_cpu(in_process: None) -> None:
    @torch.library.custom_op("test_custom_kernels::thrice", mutates_args=(), device_types="cuda")
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert thrice(torch.ones(2, device=DEVICE)).tolist() == [3.0, 3.0]
    assert scaled_sine(torch.zeros(2, device=DEVICE), 2.0).tolist() == [0.0, 0.0]


def test_only_the_first_call_asks_the_server() -> None:
    x = torch.ones(2, device=DEVICE)
    scaled_sine(x, 2.0)
    djinn.reset_stats()
    for _ in range(3):
        x = scaled_sine(x, 2.0)
    assert djinn.stats()["round_trips"] == 0
    assert x.tolist() == pytest.approx(scaled_sine(scaled_sine(scaled_sine(torch.ones(2), 2.0), 2.0), 2.0).tolist())


CPU_ONLY: list[tuple[str, Any]] = [
    ("twice(Tensor x) -> Tensor", lambda x: x * 2),
    ("pair(Tensor x, float a=1.0, *, int k=2) -> (Tensor, Tensor)", lambda x, a=1.0, k=2: (x + a, (x * k).int())),
    ("above(Tensor x, float bound) -> Tensor", lambda x, bound: (x > bound).nonzero()),
    ("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.add_(y)),
    ("fill(Tensor(a!) x, float value) -> ()", lambda x, value: (x.fill_(value), None)[1]),
    ("joined(Tensor[] xs, Tensor? y=None) -> Tensor", lambda xs, y=None: torch.cat([*xs, *([] if y is None else [y])])),
    ("rows(Tensor x) -> Tensor[]", lambda x: [row.clone() for row in x]),
    ("total(Tensor x) -> float", lambda x: float(x.sum())),
    ("square(Tensor x) -> Tensor", lambda x: x * x),
    ("refused(Tensor x) -> Tensor", lambda x: x.reshape(5, 7)),
]


def cpu_only(device: str) -> Any:
    calls = torch.ops.test_cpu_kernels
    x = torch.arange(4.0, device=device)
    written, table = x.clone(), torch.zeros(3, 3, device=device)
    same = calls.add_(written, x) is written
    calls.fill(table[1], 5.0)
    calls.add_(table[:, 2], torch.ones(3, device=device))
    leaf = torch.arange(4.0, device=device).requires_grad_()
    calls.square(leaf * 2).sum().backward()
    return (
        calls.twice(x), calls.pair(x, 0.5, k=3), calls.above(x, 1.5), calls.above(x, 9.0), calls.above(x, 0.5), same,
        written, table, calls.joined([x, x + 1]), calls.joined([x], x), calls.rows(table), calls.total(x), leaf.grad,
        outcome(lambda: calls.refused(x)), calls.twice(table.t()),
    )


@pytest.fixture
def cpu_kernels() -> Any:
    with torch.library._scoped_library("test_cpu_kernels", "DEF") as library:
        for schema, kernel in CPU_ONLY:
            library.define(schema)
            library.impl(schema.partition("(")[0], kernel, "CPU")
        torch.library.register_autograd(
            "test_cpu_kernels::square", lambda ctx, grad: grad * 2 * ctx.saved_tensors[0], setup_context=(
                lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])), lib=library)
        yield torch.ops.test_cpu_kernels


def test_what_has_only_a_kernel_for_the_cpu_runs_here_and_says_so_once(cpu_kernels: Any) -> None:
    with pytest.warns(djinn.DjinnWarning, match="has only a kernel for the CPU") as caught:
        assert_same(cpu_only)
    assert len({str(one.message) for one in caught}) == len(caught) == len(CPU_ONLY)
    memory = torch.ones(4, device=DEVICE)
    assert "writes memory" in outcome(lambda: cpu_kernels.add_(memory[1:], memory[:3]))
    assert memory.tolist() == [1.0] * 4


def test_what_has_only_a_kernel_for_the_cpu_runs_in_this_process(in_process: None, cpu_kernels: Any) -> None:
    assert_same(cpu_only)


def test_a_function_that_breaks_its_declaration_is_treated_as_in_eager() -> None:
    @torch.library.custom_op("djinn_broken::writes", mutates_args=())
    def writes(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.clone()

    @torch.library.custom_op("djinn_broken::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.library.custom_op("djinn_broken::twice", mutates_args=())
    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        made = x.clone()
        return [made, made[1:]]

    @torch.library.custom_op("djinn_broken::declared", mutates_args=("x",))
    def declared(x: torch.Tensor) -> None:
        x.add_(1).mul_(2)

    for device in ("cpu", "remote_accelerator"):
        x = torch.ones(2, requires_grad=True, device=device)
        y = x.exp()
        writes(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        z = torch.ones(2, device=device)
        declared(z)
        assert (z.tolist(), z._version) == ([4, 4], 3)
        for operator in (same, twice):
            with pytest.raises(RuntimeError, match="may not alias any inputs"):
                operator(z)
