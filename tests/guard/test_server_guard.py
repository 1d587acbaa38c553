"""Programs that mean harm, sent to a real server: refused, in time, and nobody else notices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djinn.ir.program import (
    Argument,
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Program,
    Step,
    Template,
    TensorArgument,
    TorchArgument,
)
from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Command, Define, Poisoned, Result, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.operators.dropout import count_numbers
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.allowlist import ALLOWED, lists, release
from djinn_plugins.guard.guard import CoreGuard
from djinn_plugins.guard.layouts import base_of
from djinn_plugins.guard.sizes import RESULT_BYTES
from djinn_plugins.guard.unknown_sizes import LARGEST
from djinn_plugins.transport.tcp.client import SocketConnection, connect

ONES = torch.ones(4)
GROWTH_BYTES = 16 * 2**20
TENSOR, NUMBER = TensorArgument(), NumberArgument()
FORMS = {"Tensor": TENSOR, "int": NUMBER, "float": NUMBER, "number": NUMBER, "bool": ConstantArgument(False),
         "str": ConstantArgument("/etc/passwd")}
EXTREMES = st.sampled_from([0, 1, 2, 3, 4, 5, -1, 2**31, 2**32, 2**61, 2**62 - 1, 2**62, 2**63 - 10000, 2**63 - 1,
                            -(2**63)])
SIZES = st.lists(EXTREMES, max_size=3)
HURRY_S = 0.05


@pytest.fixture
def connection(frugal_server: Any) -> Any:
    [worker] = frugal_server.workers
    opened = connect(frugal_server.address, ConnectOptions())
    opened.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])
    yield opened
    result, data = opened.request(Batch(fetch=(1,)), ())
    assert not result.failures, "the session does not live on"
    assert torch.equal(data[0], ONES)
    opened.close()
    assert frugal_server.workers == [worker], "the process that runs operations died"


def program(name: str, *arguments: Argument, operands: int = 1, results: int = 1, **keywords: Argument) -> Program:
    template = Template(name, facts_of(operator_named(name)).digest, arguments, tuple(keywords.items()))
    return Program((template,), (Step(0, tuple(range(-1, -operands - 1, -1)), results),), operands,
                   tuple(range(results)))


def run(connection: SocketConnection, body: Program, numbers: list[Any] | None = None) -> tuple[Result, float]:
    began = time.perf_counter()
    handles = tuple(range(100, 100 + len(body.keep)))
    result, _ = connection.request(
        Batch([Define(1, body), Run(1, (1,) * body.inputs, numbers or [], handles)], describe=handles,
              synchronize=True), ())
    return result, time.perf_counter() - began


def held_bytes(server: Any) -> int:
    """Memory of its own; what a forked process maps of PyTorch's libraries grows with what it has executed of them."""
    [worker] = server.workers
    status = Path(f"/proc/{worker}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def plausible(name: str) -> Program:
    """A call of an overload with something for every argument that it needs."""
    operator = operator_named(name)
    needed = [(argument, FORMS.get(str(argument.type), ListArgument(()) if "List" in str(argument.type)
                                   else ConstantArgument(None)))
              for argument in operator._schema.arguments if not argument.has_default_value()]
    kinds = facts_of(operator).returns
    return program(name, *[form for argument, form in needed if not argument.kwarg_only],
                   operands=sum(form == TENSOR for _, form in needed),
                   results=sum(kind in (ReturnKind.TENSOR, ReturnKind.PLAIN) for kind in kinds),
                   **{argument.name: form for argument, form in needed if argument.kwarg_only})


def test_every_overload_that_is_not_run_is_refused(connection: SocketConnection) -> None:
    denied = [name for name, group in lists()[release()].items() if group != ALLOWED]
    assert len(denied) > 900
    commands: list[Command] = []
    for number, name in enumerate(denied, 10):
        body = plausible(name)
        [template], handles = body.templates, tuple(range(100, 100 + len(body.keep)))
        numbers = [0] * sum(map(count_numbers, (*template.arguments, *(form for _, form in template.keywords))))
        commands += [Define(number, body), Run(number, (1,) * body.inputs, numbers, handles, handles)]
    result, _ = connection.request(Batch(commands, synchronize=True), ())
    assert [failure.kind for failure in result.failures] == ["UnknownOperatorError"] * len(denied)
    assert [failure.message.split(" is not run here")[0] for failure in result.failures] == denied


STRIDED = {
    "as_strided": program("aten::as_strided", TENSOR, NUMBER, NUMBER, NUMBER),
    "as_strided_copy": program("aten::as_strided_copy", TENSOR, NUMBER, NUMBER, NUMBER),
    "empty_strided": program("aten::empty_strided", NUMBER, NUMBER, operands=0, device=TorchArgument("device", "")),
    "new_empty_strided": program("aten::new_empty_strided", TENSOR, NUMBER, NUMBER),
    "expand": program("aten::expand", TENSOR, NUMBER),
    "repeat": program("aten::repeat", TENSOR, NUMBER),
    "zeros": program("aten::zeros", NUMBER, operands=0, device=TorchArgument("device", "")),
    "new_full": program("aten::new_full", TENSOR, NUMBER, NUMBER),
    "unfold": program("aten::unfold", TENSOR, NUMBER, NUMBER, NUMBER),
}


def numbers_for(name: str, size: list[int], stride: list[int], number: int, other: int) -> list[Any]:
    return {"as_strided": [size, stride, number], "as_strided_copy": [size, stride, number],
            "empty_strided": [size, stride], "new_empty_strided": [size, stride], "expand": [size], "repeat": [size],
            "zeros": [size], "new_full": [size, 1], "unfold": [0, number, other]}[name]


def test_the_reserve_of_a_batch_norm_is_taken_back(connection: SocketConnection) -> None:
    """As PyTorch's own formula calls it: what the forward pass gives is passed on, opaque bytes included."""
    tensors = [torch.arange(12.0).view(2, 3, 2).sin(), *(torch.ones(3) for _ in range(4)),
               torch.arange(12.0).view(2, 3, 2).cos()]
    forward, backward = "aten::_batch_norm_impl_index", "aten::_batch_norm_impl_index_backward"
    true, false = ConstantArgument(True), ConstantArgument(False)
    templates = tuple(Template(name, facts_of(operator_named(name)).digest, arguments, ()) for name, arguments in (
        (forward, (*[TENSOR] * 5, true, NUMBER, NUMBER, false)),
        (backward, (NUMBER, *[TENSOR] * 7, true, NUMBER, ListArgument((true, true, true)), TENSOR))))
    body = Program(templates, (Step(0, (-1, -2, -3, -4, -5), 5), Step(1, (-1, -6, -2, -4, -5, 1, 2, 3), 3)), 6,
                   (3, 5, 6, 7))
    handles = (100, 101, 102, 103)
    result, found = connection.request(
        Batch([*(Upload(10 + index, header_of(tensor)) for index, tensor in enumerate(tensors)), Define(1, body),
               Run(1, tuple(range(10, 16)), [0.1, 1e-5, 0, 1e-5], handles)], fetch=handles, synchronize=True), tensors)
    assert not result.failures
    reserve, *gradients = found
    assert reserve.dtype is torch.uint8
    tensor, weight, bias = (each.clone().requires_grad_() for each in tensors[:3])
    made = torch.nn.functional.batch_norm(tensor, None, None, weight, bias, training=True)
    wanted = torch.autograd.grad(made, (tensor, weight, bias), tensors[5])
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("name", list(STRIDED))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(size=SIZES, stride=SIZES, number=EXTREMES, other=EXTREMES)
def test_extreme_sizes_do_no_harm(
    frugal_server: Any, connection: SocketConnection, name: str, size: list[int], stride: list[int], number: int,
    other: int,
) -> None:
    # What the server imports when it is first asked is no growth.
    run(connection, STRIDED[name], numbers_for(name, [2], [1], 2, 1))
    before = held_bytes(frugal_server)
    result, _ = run(connection, STRIDED[name], numbers_for(name, size, stride, number, other))
    assert held_bytes(frugal_server) - before < GROWTH_BYTES
    if not result.failures:
        described = result.items[0]
        reach = sum((extent - 1) * step for extent, step in zip(described.size, described.stride, strict=True))
        is_view = name in ("as_strided", "expand", "unfold")
        assert 0 in described.size or not is_view or described.storage_offset + reach < ONES.numel()


def test_views_beyond_their_storage_are_errors(connection: SocketConnection) -> None:
    """By one element, which PyTorch refuses, too."""
    for numbers in ([[4], [1], 1], [[1], [1], 4], [[2], [4], 0]):
        result, _ = run(connection, STRIDED["as_strided"], numbers)
        assert [failure.kind for failure in result.failures] == ["RuntimeError"]


class NoShapes:
    """Shape inference that knows nothing.

    Attributes:
        asked: How often it was asked.
    """

    asked = 0

    def infer(self, *_: Any) -> None:
        self.asked += 1
        raise NotImplementedError

    def depends_on_numbers(self, _: Any) -> bool:
        return False


def test_memory_is_not_estimated_of_what_a_rule_refuses() -> None:
    """Rules hold for sizes before there are elements to look at: meta kernels trust them as well."""
    shapes = NoShapes()
    gradient = program("aten::gelu_backward", TENSOR, TENSOR, operands=2)
    checked = CoreGuard().watch(Bounds(program_bytes=2**20), shapes).check(gradient)  # type: ignore[arg-type]
    for size, asked in (((3,), 0), ((2, 3), 1)):
        checked.refused([torch.empty(size, device="meta"), torch.empty(2, 3, device="meta")], [])
        assert shapes.asked == asked


def test_what_would_take_too_much_is_refused_at_once_and_alone(
    frugal_server: Any, connection: SocketConnection,
) -> None:
    negated = Template("aten::neg", facts_of(torch.ops.aten.neg.default).digest, (TENSOR,))
    large = program("aten::zeros", NUMBER, operands=0, device=TorchArgument("device", "")).templates[0]
    body = Program((negated, large), (Step(0, (-1,), 1), Step(1, (), 1), Step(0, (1,), 1), Step(0, (0,), 1)), 1,
                   (0, 1, 2, 3))
    run(connection, body, [[4]])
    before = held_bytes(frugal_server)
    result, took_s = run(connection, body, [[2**50]])
    assert [type(item) is Poisoned for item in result.items] == [False, True, True, False]
    [failure] = result.failures
    assert (failure.kind, failure.operator, failure.step) == ("ProgramTooLargeError", "aten::zeros", 1)
    assert str(2**52) in failure.message
    assert "--program-mib" in failure.message
    assert held_bytes(frugal_server) - before < GROWTH_BYTES
    assert min(took_s, *[run(connection, body, [[2**50]])[1] for _ in range(5)]) < HURRY_S


def depending_on_data(*calls: tuple[str, tuple[Argument, ...]], first: str = "aten::nonzero") -> Program:
    """Positions of what is not zero, and calls of one after the other; all are kept."""
    names = [(first, (TENSOR,)), *calls]
    return Program(
        tuple(Template(name, facts_of(operator_named(name)).digest, arguments) for name, arguments in names),
        tuple(Step(index, (index - 1,), 1) for index in range(len(names))), 1, tuple(range(len(names))))


def test_sizes_that_depend_on_data_count_once_they_are_known(connection: SocketConnection) -> None:
    """Each step of a program is held against the limit, also those that follow what no metadata tells."""
    body = depending_on_data(("aten::neg", (TENSOR,)), ("aten::repeat", (TENSOR, NUMBER)), ("aten::neg", (TENSOR,)))
    for copies, lost in ((3, 0), (2**12, 0), (2**17, 2), (3, 0)):
        result, _ = run(connection, body, [[copies, 1]])
        assert [type(item) is Poisoned for item in result.items] == [False] * (4 - lost) + [True] * lost
        assert [(failure.kind, failure.step) for failure in result.failures] == [("ProgramTooLargeError", 2)][:lost]
        if not lost:
            assert list(result.items[3].size) == [4 * copies, 1]


@pytest.mark.parametrize("first", ["aten::nonzero", "aten::argwhere", "aten::_unique"])
def test_sizes_that_depend_on_data_count_as_the_largest(frugal_server: Any, first: str) -> None:
    """No element is asked: of zeros there would be nothing, or one."""
    opened = connect(frugal_server.address, ConnectOptions())
    body = depending_on_data(first=first) if first != "aten::_unique" else program(first, TENSOR, results=2)
    for count, kinds in ((2**15, []), (2**18, ["ProgramTooLargeError"])):
        zeros = torch.zeros(count)
        opened.request(Batch([Upload(1, header_of(zeros))], synchronize=True), [zeros])
        assert [failure.kind for failure in run(opened, body)[0].failures] == kinds
    opened.close()


def test_every_operator_whose_sizes_depend_on_data_has_a_largest_one() -> None:
    dynamic = {name: operator_named(name) for name, group in lists()[release()].items() if group == ALLOWED}
    found = {base_of(operator) for operator in dynamic.values() if torch.Tag.dynamic_output_shape in operator.tags}
    # The meta kernel of this one knows them.
    assert found - LARGEST.keys() - RESULT_BYTES.keys() == {"linalg_lstsq"}


def test_a_server_may_give_programs_less(frugal_server: Any) -> None:
    opened = connect(frugal_server.address, ConnectOptions())
    zeros = STRIDED["zeros"]
    assert not run(opened, zeros, [[2**18]])[0].failures
    assert [failure.kind for failure in run(opened, zeros, [[2**18 + 1]])[0].failures] == ["ProgramTooLargeError"]
    opened.close()


def test_namespaces_are_let_in_by_the_server(frugal_server: Any, start_server: Any) -> None:
    body = program("prims::neg", TENSOR)
    lenient = start_server("--allow-namespace", "prims")
    for address, kinds in ((frugal_server.address, ["UnknownOperatorError"]), (lenient.address, [])):
        opened = connect(address, ConnectOptions())
        opened.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])
        assert [failure.kind for failure in run(opened, body)[0].failures] == kinds
        opened.close()
