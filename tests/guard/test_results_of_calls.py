"""What a call gives becomes a value only if it is strided, and shares memory as its schema says: on any executor."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.least_executor import LeastExecutor
from support.servers.stand_ins import NAMESPACE, installed

from djinn.ir.program import ListArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Poisoned, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.calls.results import result_check_of
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.device.shapes.shapes import MetaShapes
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.guard.guard import CoreGuard
from djinn_plugins.transport.tcp.client import connect

TENSOR = TensorArgument()
ONES = torch.ones(4)
RUNS = 4
"""A program is interpreted the first time, and compiled when it repeats."""
SAID = {"same": "shares memory", "part": "shares memory", "second_of_list": "shares memory",
        **dict.fromkeys(("sparse", "sparse_of_two", "quantized"), "only strided ones become values")}


def template(name: str) -> Template:
    qualified = f"{NAMESPACE}::{name}"
    argument = ListArgument((TENSOR, TENSOR)) if name == "second_of_list" else TENSOR
    return Template(qualified, facts_of(operator_named(qualified)).digest, (argument,))


def program(name: str) -> Program:
    """The operator between two others, of which the first does not depend on it."""
    added = Template("aten::neg", facts_of(torch.ops.aten.neg.default).digest, (TENSOR,))
    operands = (-1, -1) if name == "second_of_list" else (-1,)
    results = 2 if name in ("second_of_list", "sparse_of_two") else 1
    return Program((added, template(name)), (
        Step(0, (-1,), 1), Step(1, operands, results), Step(0, (results,), 1)), 1, (0, results, results + 1))


def outcomes(name: str, carry_out: Any) -> list[tuple[list[bool], list[str]]]:
    """Run the program some times; say for each run which results are none, and what was said."""
    found = []
    for count in range(RUNS):
        define = [Upload(1, header_of(ONES)), Define(1, program(name))] if count == 0 else []
        result, _ = carry_out(Batch([*define, Run(1, (1,), [], (7, 8, 9))], describe=(7, 8, 9), synchronize=True),
                              [ONES] if define else [])
        found.append(([isinstance(item, Poisoned) for item in result.items],
                      [failure.message for failure in result.failures]))
    return found


def expect_only(name: str, lost: list[bool], said: list[str]) -> None:
    """Expect that the operator failed, if it is to fail, for its own reason."""
    assert lost == [False, name in SAID, name in SAID]
    assert any(SAID[name] in message for message in said) if name in SAID else not said


@pytest.mark.parametrize("executor", ["djinn's", "another's"])
@pytest.mark.parametrize("name", [*SAID, "right", "view"])
def test_what_is_no_value_fails_and_the_rest_is_computed(name: str, executor: str) -> None:
    made = CpuExecutor() if executor == "djinn's" else LeastExecutor(CpuExecutor())
    watch = CoreGuard().watch(Bounds(namespaces=frozenset({NAMESPACE})), MetaShapes())
    for lost, said in outcomes(name, SessionService(made, watch=watch).handle):
        expect_only(name, lost, said)


def test_a_server_has_no_such_values(start_server: Any, tmp_path: Path) -> None:
    server = start_server("--allow-namespace", NAMESPACE, PYTHONPATH=installed(tmp_path / "plugin"))
    for name in SAID:
        connection = connect(server.address, ConnectOptions())
        for lost, said in outcomes(name, connection.request):
            expect_only(name, lost, said)
        connection.close()


def test_flags_of_allowed_operators_make_no_other_layouts() -> None:
    """The gradient of an embedding, with each of its flags: what it gives with the last one is no value."""
    gradient, indices = torch.ones(3, 2), torch.tensor([0, 1, 2])
    check = result_check_of("aten::embedding_backward")
    for scales in (False, True):
        check(torch.ops.aten.embedding_backward(gradient, indices, 4, -1, scales, False), (gradient, indices))
    made = torch.ops.aten.embedding_backward(gradient, indices, 4, -1, False, True)
    with pytest.raises(RuntimeError, match="only strided ones become values"):
        check(made, (gradient, indices))


def test_operators_that_are_known_to_return_their_argument_may_do_so() -> None:
    operand = torch.ones(3)
    for operator in (torch.ops.aten.lift.default, torch.ops.aten.contiguous.default, torch.ops.aten.alias.default):
        result_check_of(operator.name())(operator(operand), (operand,))


def test_kernels_that_the_guard_does_not_check_are_looked_at_the_first_time() -> None:
    """A stand-in for one that returns its operand, which a loop over a TensorIterator never does."""
    library = torch.library.Library("aten", "IMPL")
    watch = CoreGuard().watch(Bounds(), MetaShapes())
    body = Program((Template("aten::sgn", facts_of(torch.ops.aten.sgn.default).digest, (TENSOR,)),),
                   (Step(0, (-1,), 1),), 1, (0,))
    assert not watch.check(body).calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("sgn", lambda operand: operand, "CPU")
    try:
        result, _ = SessionService(CpuExecutor(), watch=watch).handle(
            Batch([Upload(1, header_of(ONES)), Define(1, body), Run(1, (1,), [], (7,))], describe=(7,)), [ONES])
    finally:
        library._destroy()
    [failure] = result.failures
    assert "shares memory" in failure.message
