"""A refused operation fails, and what depends on it: all else is computed, and what it would have written stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import attrs
import pytest
import torch

import djinn
from djinn.errors import LimitError, UnknownOperatorError
from djinn.ir.program import Argument, ListArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Poisoned, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.device.shapes.shapes import MetaShapes
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.guard.guard import CoreGuard
from djinn_plugins.server.limits import Allowances
from djinn_plugins.server.tenant_limits import Limits

DEVICE = "remote_accelerator:0"
ROUNDS = 5


@attrs.define
class Made:
    """A tensor on the device and its twin in eager mode; or only one that depends on a refused operation."""

    lazy: torch.Tensor
    eager: torch.Tensor


class RandomProgram:
    """The same random calls in eager mode and on a session; in eager mode, refused ones leave everything as it was."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made = [self._fresh() for _ in range(4)]
        self.lost: list[torch.Tensor] = []
        self.refused = 0

    def _fresh(self) -> Made:
        eager = torch.arange(4.0).view(2, 2) * self._random.choice((0.25, -0.5))
        return Made(eager.to(DEVICE), eager.clone())

    def _drawn(self) -> Made:
        return self._random.choice(self.made)

    def step(self, refuses: bool) -> None:
        one, other = self._drawn(), self._drawn()
        if refuses:
            try:
                self._refused(one, other)
                self.refused += 1
            except UnknownOperatorError:
                # Where its metadata cannot be inferred, the executor is asked at its line.
                self.refused = 0
        match self._random.randrange(6):
            case 0:
                self.made.append(Made(one.lazy @ other.lazy, one.eager @ other.eager))
            case 1:
                one.lazy.mul_(0.5).add_(other.lazy)
                one.eager.mul_(0.5).add_(other.eager)
            case 2:
                self.made.append(Made(one.lazy.t(), one.eager.t()))
            case 3:
                torch.sin_(one.lazy)
                torch.sin_(one.eager)
            case 4:
                drawn = torch.rand(2, 2, device=DEVICE)
                self.made.append(Made(drawn + one.lazy, torch.rand(2, 2) + one.eager))
            case _:
                self.made.append(Made(one.lazy.relu() + other.lazy, one.eager.relu() + other.eager))
        if len(self.made) > 8:
            self.made.pop(self._random.randrange(len(self.made)))

    def _refused(self, one: Made, other: Made) -> None:
        match self._random.randrange(3):
            case 0:
                self.lost.append(torch.ops.aten._test_warn_in_autograd(one.lazy) + other.lazy)
            case 1:
                torch.ops.aten.relu.out(one.lazy, out=other.lazy)
            case _:
                self.lost.append(torch.batch_norm_elemt(one.lazy[None], *[one.lazy[0]] * 4, 1e-5) @ other.lazy)


def expect_reported_once(program: RandomProgram) -> None:
    if program.refused:
        with pytest.raises(UnknownOperatorError, match="is not run here"):
            djinn.synchronize()
    djinn.synchronize()
    program.refused = 0


def expect_equal(program: RandomProgram) -> None:
    for lazy, eager in [(made.lazy, made.eager) for made in program.made]:
        assert torch.equal(lazy.cpu(), eager)
    for lazy in program.lost:
        with pytest.raises(UnknownOperatorError, match="is not run here"):
            lazy.cpu()


@pytest.fixture(params=["plain", "at once", "at the end", "fleet", "named", "debugged", "reused", "recoverable"])
def refusing(request: pytest.FixtureRequest, server: Any, second_server: Any) -> Iterator[None]:
    options = {"at once": {"flush_every": 1}, "at the end": {"flush_every": None}, "named": {"name": "refused"},
               "debugged": {"debug": True}, "reused": {"result_cache_bytes": 2**20},
               "recoverable": {"recovery": "replay"}}.get(request.param, {})
    if request.param == "fleet":
        djinn.init(servers=[server.address, second_server.address], placement="automatic")
    else:
        djinn.init(server=server.address, **options)
    yield
    djinn.shutdown()


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("seed", range(3))
def test_what_does_not_depend_on_a_refused_operation_equals_eager(seed: int) -> None:
    program = RandomProgram(seed)
    torch.manual_seed(seed)
    chosen = random.Random(~seed)
    for _ in range(ROUNDS):
        for _ in range(12):
            program.step(refuses=chosen.randrange(12) == 0)
        expect_reported_once(program)
        expect_equal(program)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_loop_with_a_refused_operation_computes_the_rest(place: int) -> None:
    """The same program again and again: it is compiled, and loops run ahead of their requests."""
    x, total = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    expected = torch.ones(4)
    for count in range(1, 13):
        for step in range(7):
            if step == place:
                torch.ops.aten.relu.out(-x, out=total)
            x = x * 1.5
        total.add_(1)
        with suppress(UnknownOperatorError):
            assert x.sum().item() == pytest.approx(4 * 1.5 ** (7 * count))
        with suppress(UnknownOperatorError):
            djinn.synchronize()
        expected = expected * 1.5 ** 7
        assert torch.allclose(x.cpu(), expected)
        assert total.tolist() == [count] * 4


def test_a_refused_write_leaves_the_values_that_share_memory_as_they_were(session: Any) -> None:
    given, written = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    same = written[2:]
    torch.ops.aten.relu.out(given[1:], out=written[1:])
    with pytest.raises(UnknownOperatorError, match="is not run here"):
        same.cpu()
    assert same.tolist() == [0.0] * 2
    assert written.tolist() == [0.0] * 4


class FiveSteps:
    """Lets programs have five steps."""

    def steps_beyond(self, steps: int) -> dict[int, Exception]:
        return dict.fromkeys(range(5, steps), LimitError("The program has too many steps."))

    def admit_values(self, held: int, more: int) -> None:
        pass


def template(name: str, *arguments: Argument, digest: str = "") -> Template:
    return Template(name, digest or facts_of(torch.ops.aten.mul.Tensor).digest, arguments)


TENSOR = TensorArgument()
SCALED, PRODUCT = template("aten::mul.Tensor", TENSOR, NumberArgument()), template("aten::mul.Tensor", TENSOR, TENSOR)
REFUSED = {
    "unknown": template("aten::there_is_no_such", TENSOR, TENSOR, NumberArgument()),
    "another schema": template("aten::mul.Tensor", TENSOR, TENSOR, digest="another"),
    "of files": template("aten::from_file", TENSOR, TENSOR),
    "wrong form": template("aten::mul.Tensor", TENSOR, ListArgument((TENSOR,))),
}
KINDS = {"unknown": "UnknownOperatorError", "another schema": "SchemaMismatchError", "of files": "UnknownOperatorError",
         "too many steps": "LimitError"}


@pytest.mark.parametrize(("kind", "guarded"), [
    *((kind, True) for kind in (*REFUSED, "wrong number of results", "too many steps")),
    *((kind, False) for kind in (*REFUSED, "too many steps"))])
@pytest.mark.parametrize("place", range(5))
def test_each_reason_to_refuse_a_step_leaves_the_others(kind: str, place: int, guarded: bool) -> None:
    is_long = kind == "too many steps"
    service = SessionService(
        CpuExecutor(), allowance=FiveSteps() if is_long else None,
        watch=CoreGuard().watch(Bounds(), MetaShapes()) if guarded else None)
    # Four multiples of the input; between them what is refused, with a number if it has one; and what depends on it.
    results = 2 if kind == "wrong number of results" else 1
    steps = [Step(0, (-1,), 1) for _ in range(4)]
    if not is_long:
        steps.insert(place, Step(1, (-1, -1), results))
        steps.append(Step(2, (place, -1), 1))
    else:
        steps += [Step(0, (-1,), 1), Step(1, (-1, -1), 1), Step(0, (5,), 1)]
    body = Program((SCALED, REFUSED.get(kind, PRODUCT), PRODUCT), tuple(steps), 1,
                   tuple(range(sum(step.results for step in steps))))
    numbers: list[Any] = [2, 3, 4, 5] + [6, 7] * is_long
    if kind == "unknown":
        numbers.insert(place, 100)
    lost = {5, 6} if is_long else {*range(place, place + results), 4 + results}
    for count in range(3):
        handles = tuple(range(10, 10 + len(body.keep)))
        define = [Upload(1, header_of(torch.ones(2))), Define(1, body)] if count == 0 else []
        result, data = service.handle(
            Batch([*define, Run(1, (1,), numbers, handles)], fetch=handles), [torch.ones(2)] if define else [])
        assert {place for place, item in enumerate(result.items) if isinstance(item, Poisoned)} == lost
        assert [value.tolist() for value in data] == [[n, n] for n in (2.0, 3.0, 4.0, 5.0, 6.0)[:4 + is_long]]
        [failure] = result.failures
        assert failure.kind == KINDS.get(kind, failure.kind)
        assert (failure.run, failure.step) == (1, 5 if is_long else place)


def test_values_beyond_the_limit_are_not_made_and_the_others_are() -> None:
    allowance = Allowances(Limits(handles=3)).open()
    service = SessionService(CpuExecutor(), allowance=allowance)
    body = Program((SCALED,), tuple(Step(0, (-1,), 1) for _ in range(4)), 1, (0, 1, 2, 3))
    commands = [Upload(1, header_of(torch.ones(2))), Define(1, body), Run(1, (1,), [2, 3, 4, 5], (10, 11, 12, 13))]
    result, data = service.handle(Batch(commands, fetch=(10, 11, 12, 13)), [torch.ones(2)])
    assert [value.tolist() for value in data] == [[2.0, 2.0], [3.0, 3.0]]
    assert [isinstance(item, Poisoned) for item in result.items] == [False, False, True, True]
    assert [failure.kind for failure in result.failures] == ["LimitError"]
