"""The law of sessions about calls that differ in where their operands begin, or in an index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject

_SIZE = (5, 4, 6)
_Call = Callable[[torch.Tensor], Any]
LAYOUTS: dict[str, _Call] = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.transpose(0, 2),
    "stepped": lambda base: base[:, ::2, 1:],
    "expanded": lambda base: base[:, :1].expand(-1, 3, -1),
    "one element": lambda base: base[:, :1, :1],
}
BODIES: dict[str, _Call] = {
    "add_": lambda part: part.add_(1.5) if 0 not in part.stride() else part.add(1.5),
    "mul": lambda part: part * 2,
    "sum": lambda part: part.sum(-1),
    "copy_": lambda part: torch.zeros_like(part).copy_(part),
    "transpose": lambda part: part.transpose(0, 1),
    "view again": lambda part: part[:1].unsqueeze(-1),
    "unbind": lambda part: part.unbind(0),
    "chunk": lambda part: part.chunk(2, -1),
    "complex": lambda part: torch.view_as_real(torch.complex(part, part)),
    "another dtype": lambda part: part.contiguous().view(torch.int32),
    "its bytes": lambda part: part.view(torch.int32) if part.is_contiguous() else part.clone(),
    "diagonal": lambda part: part.diagonal(),
    "as_strided": lambda part: part.as_strided((2,), (1,), 3),
    "cat": lambda part: torch.cat([part, part]),
    "norm": lambda part: torch.layer_norm(part, part.shape[-1:]),
    "select_scatter": lambda part: part.select_scatter(torch.zeros_like(part[0]), 0, 1),
    "slice_scatter": lambda part: part.slice_scatter(torch.zeros_like(part[:1]), 0, 0, 1),
    "diagonal_scatter": lambda part: part.diagonal_scatter(torch.zeros_like(part.diagonal())),
    "product": lambda part: part @ part.transpose(0, 1),
}
_NUMBERS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "add": lambda part, number: part + number,
    "rsub": lambda part, number: number - part,
    "mul": lambda part, number: part.mul(number),
    "div": lambda part, number: part / number,
    "eq": lambda part, number: part == number,
    "remainder": lambda part, number: part % number,
    "alpha": lambda part, number: torch.add(part, part, alpha=number),
    "clamp": lambda part, number: part.clamp(-number, number),
    "fill_": lambda part, number: torch.zeros_like(part).fill_(number),
    "masked_fill": lambda part, number: part.masked_fill(part == 2, number),
    "addcmul": lambda part, number: torch.addcmul(part, part, part, value=number),
    "pow": lambda part, number: part ** (2 - number),
    "sum": lambda part, number: part.sum(number % 2),
    "roll": lambda part, number: part.roll(number, 0),
}
_INDICES = (0, 1, 3, -1, -4, 4, 6, -7)
_SLICES = tuple(itertools.product((None, 0, 2, -2, -9, 9), (None, 0, 3, -1, -9, 9), (1, 2, 5)))


def _outcome(call: Callable[..., Any], *args: Any) -> list[torch.Tensor] | type[Exception]:
    """Return the tensors of a call's result, or the kind of its error."""
    try:
        result = call(*args)
    except (IndexError, RuntimeError, ValueError) as error:
        return type(error)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _agree(got: Any, wanted: Any, where: str, values: list[tuple[torch.Tensor, torch.Tensor, str]]) -> None:
    """Compare metadata, and add what has values to compare later."""
    __tracebackhide__ = True
    if isinstance(got, type) or isinstance(wanted, type):
        expect_equal(got, wanted, "outcome", where)
        return
    for mine, theirs in zip(got, wanted, strict=True):
        for name in ("size", "stride", "storage_offset"):
            expect_equal(getattr(mine, name)(), getattr(theirs, name)(), name, where)
        values.append((mine, theirs.clone(), where))


def _sliced(dim: int, start: int | None, end: int | None, step: int, base: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.slice.Tensor(base, dim, start, end, step)
    return made


def _compare(session: Session, values: list[tuple[torch.Tensor, torch.Tensor, str]]) -> None:
    __tracebackhide__ = True
    for got, (_, wanted, where) in zip(session.materialize([mine for mine, *_ in values]), values, strict=True):
        expect_same_tensor(got, wanted, "the result", where)
    values.clear()


def _indexed(dim: int) -> Iterator[tuple[str, _Call]]:
    for index in _INDICES:
        yield f"select({dim}, {index})", partial(torch.select, dim=dim, index=index)
    for start, end, step in _SLICES:
        yield f"slice({dim}, {start}:{end}:{step})", partial(_sliced, dim, start, end, step)
    for start in _INDICES:
        yield f"narrow({dim}, {start}, 2)", partial(torch.narrow, dim=dim, start=start, length=2)


@law("session.places_derived")
def test_places_derived(subject: Subject, session: Session) -> None:
    """Make each call on parts of a tensor in turn, and take indices and slices of it."""
    local = torch.linspace(-1, 1, 120).view(_SIZE)
    values: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    remote = session.upload(local)
    for (layout, lay), (body, call) in itertools.product(LAYOUTS.items(), BODIES.items()):
        for index in (0, 1, 3):
            wanted = _outcome(call, lay(local)[index:index + 2])
            got = _outcome(call, lay(remote)[index:index + 2])
            _agree(got, wanted, f"{subject}: {body} of {layout} from {index}", values)
            _compare(session, values)
    for layout, lay in LAYOUTS.items():
        for name, take in itertools.chain.from_iterable(map(_indexed, (0, -2, 3))):
            _agree(_outcome(take, lay(remote)), _outcome(take, lay(local)), f"{subject}: {name} of {layout}", values)
        _compare(session, values)
    for dtype, (body, change), number in itertools.product(
            (torch.int64, torch.float32, torch.uint8), _NUMBERS.items(), (1, 2, 3, 5)):
        plain = torch.arange(12, dtype=dtype).view(3, 4)
        _agree(_outcome(change, session.upload(plain), number), _outcome(change, plain, number),
               f"{subject}: {body} of {dtype} by {number}", values)
        _compare(session, values)
    parts = session.upload(torch.zeros(50))
    parts[1] += parts[2]
    asked: list[str] = []
    infer = session.planner._infer

    def count(operator: Any, *call: Any) -> Any:
        asked.append(str(operator))
        return infer(operator, *call)

    session.planner._infer = count
    try:
        for index in range(3, 20):
            parts[index] += parts[index + 1]
            parts[index:index + 2].mul_(index)
            (parts + index).clamp(0, index).div(index).eq(index)
    finally:
        session.planner._infer = infer
    expect(len(asked) == len(set(asked)) <= 8, "calls whose shapes were inferred", got=asked,
           wanted="the first of each kind", where=str(subject))
