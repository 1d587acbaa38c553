"""A call of an operator, with its arguments by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.facts import OperatorFacts
from djinn_plugins.graph.graph import GraphNode, Operand

Shape: TypeAlias = tuple[int, ...]


@attrs.frozen(eq=False)
class OperatorCall:
    """A call of an operator that this PyTorch has."""

    operator: Any
    arguments: Mapping[str, Any]
    """By the schema's names, defaults included; tensors are represented by their specs."""
    results: Sequence[TensorSpec | None]

    def shape(self, name: str) -> Shape:
        """Return the size of a tensor argument.

        Raises:
            TypeError: It is not a tensor.
        """
        found = self.arguments.get(name)
        if not isinstance(found, TensorSpec):
            raise TypeError(f"{name} is no tensor.")
        return tuple(found.size)

    def shapes(self, name: str) -> list[Shape]:
        """Return the sizes of the tensors in a list."""
        return [tuple(member.size) for member in self.arguments.get(name) or () if isinstance(member, TensorSpec)]

    @property
    def out(self) -> Shape:
        """Size of the first result, or of the tensor that is written in place if there is none."""
        made = next((spec for spec in self.results if spec is not None), None)
        return self.shape("self") if made is None else tuple(made.size)

    @property
    def elements(self) -> int:
        """Number of elements of `out`."""
        return math.prod(self.out)

    def on_meta(self) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments, with tensors without data in place of specs."""
        positional, named = [], {}
        for argument in self.operator._schema.arguments:
            if argument.name in self.arguments:
                value = on_meta(self.arguments[argument.name])
                if argument.kwarg_only:
                    named[argument.name] = value
                else:
                    positional.append(value)
        return positional, named

    def inferred(self) -> tuple[TensorSpec, ...]:
        """Metadata of the results, by PyTorch's own inference."""
        positional, named = self.on_meta()
        with torch.no_grad():
            made = self.operator(*positional, **named)
        return tuple(TensorSpec(made.size(), made.stride(), 0, made.dtype, made.device)
                     for made in (made if isinstance(made, (tuple, list)) else [made])
                     if isinstance(made, torch.Tensor))


def on_meta(value: Any) -> Any:
    """Convert specs to tensors without data, in lists too."""
    if isinstance(value, TensorSpec):
        return torch.empty(value.size, dtype=value.dtype, device="meta")
    return [on_meta(item) for item in value] if isinstance(value, list) else value


def bind(
    facts: OperatorFacts,
    node: GraphNode,
    operands: Sequence[TensorSpec | None],
    results: Sequence[TensorSpec | None],
) -> OperatorCall:
    """Bind a node's arguments to their names.

    Args:
        facts: The operator, which is known.
        node: The node. If its graph keeps no arguments, tensors are taken in order.
        operands: Metadata of its inputs.
        results: Metadata of its outputs. If all of it is unknown, sizes are inferred from the operator.
    """
    assert facts.operator is not None
    schema = facts.operator._schema.arguments
    named = dict(named_arguments(facts, node))
    bound = {name: _filled(given, operands) for name, given in named.items()}
    for argument in schema:
        if argument.name not in bound and argument.has_default_value():
            bound[argument.name] = argument.default_value
    made = OperatorCall(facts.operator, bound, results)
    if node.outputs and not any(results):
        made = attrs.evolve(made, results=made.inferred())
    return made


def named_arguments(facts: OperatorFacts, node: GraphNode) -> list[tuple[str, Any]]:
    """Pair the node's arguments with the schema's names."""
    if node.arguments or node.keywords or facts.operator is None:
        return [*zip(facts.argument_names, node.arguments, strict=False), *node.keywords.items()]
    tensors = [argument.name for argument in facts.operator._schema.arguments if "Tensor" in str(argument.type)]
    return [(name, Operand(position)) for position, name in enumerate(tensors[:len(node.inputs)])]


def names_of_operands(facts: OperatorFacts, node: GraphNode) -> dict[int, str]:
    """Map the positions of a node's inputs to the names of the arguments that contain them."""
    found: dict[int, str] = {}
    for name, given in named_arguments(facts, node):
        pending = [given]
        while pending:
            item = pending.pop()
            if isinstance(item, Operand):
                found[item.position] = name
            elif isinstance(item, list):
                pending += item
    return found


def _filled(given: Any, operands: Sequence[TensorSpec | None]) -> Any:
    if isinstance(given, Operand):
        return operands[given.position] if given.position < len(operands) else None
    if isinstance(given, (list, tuple)):
        return [_filled(item, operands) for item in given]
    return given
