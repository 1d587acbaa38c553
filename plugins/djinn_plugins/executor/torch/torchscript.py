"""Runs segments of a program in PyTorch's own interpreter, which calls operators from C++.

To call an operator from Python takes about as long as a small kernel. A segment is a sequence of steps that do nothing
but give results. It becomes a graph of TorchScript, run without any of its optimizations, so that the same kernels run
in the same order with the same arguments. If a step of it raises, the segment is run again step by step, which tells
which one.

PyTorch deprecates TorchScript as a language, and may remove its interpreter. Programs then run as they do elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import attrs
import torch

from djinn.ir.program import ListArgument, NumberArgument, Program, TensorArgument
from djinn.ir.schema import ReturnKind
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("GraphBudget", "GraphSegment", "segments_of")

LEAST_STEPS = 3
"""A shorter segment costs more than its steps."""
MOST_STEPS = 64
"""Between two segments a run can be cancelled, and values are freed that the first one read."""

MOST_GRAPH_STEPS = 65_536
"""Most steps in graphs of one executor, at some 5 KiB each. Programs beyond it stay as they are."""
_TENSOR = torch._C.TensorType.get()
_LIST = torch._C.ListType(_TENSOR)
_TENSORS = frozenset(("Tensor", "Optional[Tensor]"))
_TAKING_NUMBERS = {
    f"aten::{name}.Tensor": getattr(torch.ops.aten, name).Scalar for name in ("add", "sub", "mul", "div")}
"""Overloads that make a tensor of the number and call the other one, as calls from Python do (BinaryOps.cpp)."""

ParameterKind: TypeAlias = Literal["operand", "number", "constant"]


@attrs.frozen
class GraphSegment:
    """Some consecutive steps of a program, as one function.

    Attributes:
        first: The first step.
        steps: The number of steps.
        function: Takes the parameters, and returns a tuple of the results; a single result as it is.
        parameters: Its arguments, in order: an operand, as `djinn.ir.program.Step.operands` names them, the position of
            a number among those of the run, or a constant.
        results: The results that later steps read, or that outlive the program.
    """

    first: int
    steps: int
    function: Callable[..., Any]
    parameters: tuple[tuple[ParameterKind, Any], ...]
    results: tuple[int, ...]


class GraphBudget:
    """Counts the steps in an executor's graphs, so that they do not fill the memory.

    Args:
        most_steps: Most of them.
    """

    def __init__(self, most_steps: int = MOST_GRAPH_STEPS) -> None:
        self._most_steps = most_steps
        self._steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def take(self, program: object, steps: int) -> bool:
        """Take room for a program's steps until it is freed; return whether there was room."""
        if steps + sum(self._steps.values()) > self._most_steps:
            return False
        self._steps[program] = steps
        return True


def segments_of(program: Program, calls: Sequence[BoundCall]) -> list[GraphSegment]:
    """Find the steps that PyTorch's interpreter can run; none if this PyTorch has no such interpreter."""
    if not hasattr(torch._C, "_create_function_from_graph"):
        return []
    read_at = _last_reads(program)
    found: list[GraphSegment] = []
    builder = _GraphBuilder(program, calls)
    for position in range(len(program.steps)):
        if not builder.add(position) or builder.steps == MOST_STEPS:
            found += builder.finish(read_at)
        builder.skip(position)
    return found + builder.finish(read_at)


def _last_reads(program: Program) -> dict[int, int]:
    """Return for each result the last step that reads it; for those that outlive the program, a later one."""
    last = {operand: position for position, step in enumerate(program.steps) for operand in step.operands}
    return last | dict.fromkeys(program.keep, len(program.steps))


class _UnsuitableError(Exception):
    """A step cannot be part of a graph."""


class _GraphBuilder:
    """Collects steps in a graph.

    Attributes:
        produced: Number of results of the steps so far, in the graph or not.
        steps: Number of steps in the graph.
    """

    def __init__(self, program: Program, calls: Sequence[BoundCall]) -> None:
        self.produced = 0
        self._taken = 0
        self._program = program
        self._calls = calls
        self._signatures = [_Signature.of(call, operator_named(template.operator))
                            for call, template in zip(calls, program.templates, strict=True)]
        self._is_found: dict[int, bool] = {}
        self._begin()

    def _begin(self) -> None:
        self._graph = torch._C.Graph()
        self._parameters: list[tuple[ParameterKind, Any]] = []
        self._values: dict[int, Any] = {}
        """By operand: its value in the graph."""
        self._first = self._produced_before = self.steps = 0

    def skip(self, position: int) -> None:
        """Count the results and numbers of a step, whether it is in the graph or not."""
        step = self._program.steps[position]
        self.produced += step.results
        self._taken += self._calls[step.template].numbers

    def add(self, position: int) -> bool:
        """Add a step, and return whether that was possible."""
        step = self._program.steps[position]
        call = self._calls[step.template]
        if not self._signatures[step.template].is_suitable:
            return False
        try:
            node = self._called(step.template, step.operands)
            results = self._unpacked(call, node, step.results)
        except _UnsuitableError:
            return False
        if len(results) != step.results:
            return False
        if not self.steps:
            self._first, self._produced_before = position, self.produced
        self._values.update(zip(range(self.produced, self.produced + step.results), results, strict=True))
        self.steps += 1
        return True

    def finish(self, read_at: dict[int, int]) -> list[GraphSegment]:
        """Return the segment of the steps so far, if it is worth while, and begin another."""
        results = [result for result in self._values if result >= self._produced_before
                   and read_at.get(result, -1) >= self._first + self.steps]
        made = []
        if self.steps >= LEAST_STEPS and results:
            for result in results:
                self._graph.registerOutput(self._values[result])
            if len(results) > 1:
                self._graph.makeMultiOutputIntoTuple()
            function = torch._C._create_function_from_graph("segment", self._graph)
            made.append(GraphSegment(self._first, self.steps, function, tuple(self._parameters), tuple(results)))
        self._begin()
        return made

    def _called(self, template: int, operands: Sequence[int]) -> Any:
        """Add a call with all arguments of its schema, and return its node."""
        call, signature = self._calls[template], self._signatures[template]
        tensors, numbers = iter(operands), iter(range(self._taken, self._taken + call.numbers))
        forms = [*zip(signature.types, call.arguments, strict=False), *call.keywords]
        given = {name: self._argument(form, signature.types[name], tensors, numbers) for name, form in forms}
        for name, default in signature.defaults.items():
            if name not in given:
                given[name] = self._constant(default, signature.types[name])
        if len(given) < len(signature.types):
            raise _UnsuitableError
        node = self._graph.create(signature.name, [given[name] for name in signature.types], signature.returns)
        if signature.is_list:
            node.output().setType(_LIST)
        # The types of the values are the same for each call.
        if template not in self._is_found:
            self._is_found[template] = node.schema() == signature.schema
        if not self._is_found[template]:
            raise _UnsuitableError
        self._graph.insertNode(node)
        return node

    def _argument(self, form: Any, declared: Any, tensors: Iterator[int], numbers: Iterator[int]) -> Any:
        """Return the value in the graph of an argument of the declared type."""
        if isinstance(form, ListArgument):
            return self._list(form, declared, tensors, numbers)
        if isinstance(form, TensorArgument):
            if str(declared) not in _TENSORS:
                raise _UnsuitableError
            operand = next(tensors)
            if operand not in self._values:
                self._values[operand] = self._parameter("operand", operand, _TENSOR)
            return self._values[operand]
        if isinstance(form, NumberArgument):
            if str(declared) in _TENSORS:
                raise _UnsuitableError
            return self._parameter("number", next(numbers), declared)
        return self._constant(form.value, declared)

    def _list(self, form: ListArgument, declared: Any, tensors: Iterator[int], numbers: Iterator[int]) -> Any:
        if isinstance(declared, torch._C.OptionalType):
            declared = declared.getElementType()
        if not isinstance(declared, torch._C.ListType):
            raise _UnsuitableError
        kind = declared.getElementType()
        items = [self._argument(item, kind, tensors, numbers) for item in form.items]
        if not all(item.type().isSubtypeOf(kind) for item in items):
            raise _UnsuitableError
        node = self._graph.insertNode(self._graph.create("prim::ListConstruct", items, 1))
        node.output().setType(declared)
        return node.output()

    def _constant(self, value: Any, declared: Any) -> Any:
        try:
            return self._graph.insertConstant(value)  # type: ignore[attr-defined]  # PyTorch's stubs lack it
        except (RuntimeError, TypeError):
            # A memory format, for example.
            return self._parameter("constant", value, declared)

    def _parameter(self, kind: ParameterKind, meaning: Any, declared: Any) -> Any:
        self._parameters.append((kind, meaning))
        value = self._graph.addInput()
        value.setType(declared)
        return value

    def _unpacked(self, call: BoundCall, node: Any, results: int) -> list[Any]:
        """Return the results of a call in the order in which a program numbers them."""
        if call.returns != (ReturnKind.LIST,):
            return list(node.outputs())
        unpack = self._graph.insertNode(self._graph.create("prim::ListUnpack", [node.output()], results))
        for value in unpack.outputs():
            value.setType(_TENSOR)
        return list(unpack.outputs())


@attrs.frozen
class _Signature:
    """How a graph calls an operator.

    Attributes:
        name: The operator's name, without its overload.
        schema: The overload's schema.
        types: Type of each argument, by name and in order.
        defaults: Values of the arguments that may be left out.
        returns: The number of returns.
        is_list: Whether it returns one list of tensors.
        is_suitable: Whether calls do nothing but compute tensors, and are made as they are: nothing checks or replaces
            their arguments.
    """

    name: str
    schema: str
    types: Mapping[str, Any]
    defaults: Mapping[str, Any]
    returns: int
    is_list: bool
    is_suitable: bool

    @classmethod
    def of(cls, call: BoundCall, operator: torch._ops.OpOverload) -> Self:
        """Read the operator's schema."""
        is_list = call.returns == (ReturnKind.LIST,)
        is_suitable = call.function is operator._op and call.is_pure and not call.is_random and bool(call.returns) and (
            is_list or set(call.returns) == {ReturnKind.TENSOR})
        if len(call.arguments) > 1 and isinstance(call.arguments[1], NumberArgument):
            # A graph makes no tensor of a number.
            operator = _TAKING_NUMBERS.get(operator.name(), operator)
        arguments = operator._schema.arguments
        return cls(
            operator._schema.name, str(operator._schema), {argument.name: argument.type for argument in arguments},
            {argument.name: argument.default_value for argument in arguments if argument.has_default_value()},
            len(call.returns), is_list, is_suitable)
