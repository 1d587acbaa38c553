"""A program that repeats, on the executor, against calling PyTorch directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import djinn
from djinn.session.programs import lay_out, program_of
from djinn_plugins.executor.cpu.executor import CpuExecutor

BLOCKS = 40
BLOCK = """
 x = mm(x, w)
 x = add(x, b)
 y = relu(x)
 y = mul(y, 0.5)
 z = t(y)
 z = sub(z, x)
 z = softmax(z, 1)
 x = add(x, z)
"""
aten = torch.ops.aten
OVERLOADS = {"mm": aten.mm.default, "add": aten.add.Tensor, "relu": aten.relu.default, "mul": aten.mul.Tensor,
             "t": aten.t.default, "sub": aten.sub.Tensor, "softmax": aten.softmax.int}
"""Bound once: looking an overload up costs about as much as calling it."""
PASSES = 40


def straight_line() -> Callable[..., torch.Tensor]:
    """A function of 320 lines, each one call of an ATen overload."""
    namespace: dict[str, Any] = dict(OVERLOADS)
    exec(f"def direct(x, w, b):{BLOCK * BLOCKS} return x", namespace)
    return namespace["direct"]


def test_replay(compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(32, 32), torch.randn(32, 32) / 6, torch.randn(32)]
    direct = straight_line()
    session = djinn.init(device="cpu", flush_every=None)
    with torch.inference_mode():
        there = [tensor.to("remote_accelerator:0") for tensor in inputs]
        djinn.synchronize()
        recorded = direct(*there)
        nodes = session.tape.cut()
        assert len(nodes) == 8 * BLOCKS
        alive = recorded._value.slot.number
        layout = lay_out(nodes, {slot.number for node in nodes for slot in node.outputs if slot.number != alive})
        handles = [tensor._value.slot.number for tensor in there]
        order = [handles.index(handle) for handle in layout.inputs]
        executor = CpuExecutor()
        program, random = executor.compile(program_of(nodes, layout)), executor.random_state(0)

        def ours() -> list[Any]:
            return program.run([inputs[index] for index in order], layout.numbers, random, refuse)

        for _ in range(3):
            (result,) = ours()
            assert torch.equal(result, direct(*inputs))
        comparison = compare(lambda: [direct(*inputs) for _ in range(PASSES)], lambda: [ours() for _ in range(PASSES)],
                             turns=21, warmup_turns=2)
    publish(comparison.cost, comparison.details)


def refuse(step: int, error: BaseException) -> Any:
    raise AssertionError(f"step {step} failed") from error
