"""The operators of a program, resolved and checked once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.errors import ProtocolError, SchemaMismatchError, UnknownOperatorError
from djinn.ir.program import Program, Template, count_tensors
from djinn.ir.schema import ReturnKind, SchemaFacts, facts_of
from djinn.ir.spec import tensors_in
from djinn.wire.tensors import dtype_named
from djinn_plugins.common.calls.arguments import Form, resolve
from djinn_plugins.common.calls.checked import checked_call
from djinn_plugins.common.calls.results import ResultCheck, result_check_of
from djinn_plugins.common.calls.switches import Switches, check_switches, switched
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.common.memory.shared_values import unshare
from djinn_plugins.common.operators.dropout import count_numbers, dropout_numbers, may_drop
from djinn_plugins.common.operators.operators import is_as_declared, operator_named

_REFUSED = frozenset({"aten::from_file", "aten::from_file.out", "aten::save"})
"""Operators that access the executor's file system."""
_UNCHECKED = re.compile(r"aten::_sparse_\w+_unsafe(\.\w+)?")
"""Operators that trust their indices; their results read and write memory by them."""


def _recurrent_layer(*arguments: Any) -> Any:
    """Run oneDNN's layer for training or inference: the kernel uses the grad mode, the client the last argument."""
    with torch.set_grad_enabled(bool(arguments[-1])):
        return torch.ops.aten.mkldnn_rnn_layer(*arguments)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::mkldnn_rnn_layer": _recurrent_layer}
"""Replacements for operators whose kernels depend on more than their arguments."""


@attrs.frozen
class BoundCall:
    """A template bound to an operator.

    Attributes:
        function: The function to call.
        arguments, keywords: Their forms, with PyTorch's constants resolved.
        returns: Kind of each return.
        written_operands: Positions, among the tensor operands, of those that it writes.
        numbers: Number of numeric arguments.
        is_random: Whether it draws random numbers.
        is_pure: Whether it has no effects besides its results, if its dropout probabilities are zero.
        draws: Whether it draws random numbers even then.
        writes: Whether it may do more than give results and draw.
        probabilities: Positions of these among its numbers.
        switches: PyTorch's process-wide switches under which it runs.
        grows: Whether results lie in spare room of an operand, which `djinn_plugins.executor.torch.growing` accounts
        for.
    """

    function: Callable[..., Any]
    arguments: tuple[Form, ...]
    keywords: tuple[tuple[str, Form], ...]
    returns: tuple[ReturnKind, ...]
    written_operands: tuple[int, ...]
    numbers: int
    is_random: bool
    is_pure: bool
    draws: bool
    writes: bool
    probabilities: tuple[int, ...]
    switches: Switches
    grows: bool = False


def bind(program: Program, device: torch.device, checks: Mapping[int, CallCheck] | None = None) -> list[BoundCall]:
    """Bind every template of a program.

    Args:
        program: The program.
        device: The device that logical devices stand for.
        checks: By template: the check before each of its calls.
    """
    calls = [_bind(template, device) for template in program.templates]
    for index, check in (checks or {}).items():
        results = result_check_of(program.templates[index].operator)
        calls[index] = attrs.evolve(calls[index], function=_asking(check, calls[index].function, results))
    if len({call.switches for call in calls}) > 1:
        # Otherwise they are the same for a whole run.
        calls = [attrs.evolve(call, function=_switched(call.switches, call.function)) for call in calls]
    return calls


def _switched(wanted: Switches, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with switched(wanted):
            return function(*args, **kwargs)

    return call


def _growing(function: Callable[..., Any], positions: Sequence[int], keywords: Sequence[str]) -> Callable[..., Any]:
    """Return a function that first copies shared memory of tensors that it may resize; PyTorch would fail."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in tensors_in([*(args[index] for index in positions), *map(kwargs.get, keywords)]):
            unshare(tensor)
        return function(*args, **kwargs)

    return call


def _asking(check: CallCheck, function: Callable[..., Any], results: ResultCheck) -> Callable[..., Any]:
    return lambda *args, **kwargs: checked_call(check, args, kwargs, function, results)


def _bind(template: Template, device: torch.device) -> BoundCall:
    if template.operator in _REFUSED:
        raise UnknownOperatorError(f"{template.operator} is not run here.", hint="It would touch the server's files.")
    if _UNCHECKED.fullmatch(template.operator):
        raise UnknownOperatorError(f"{template.operator} is not run here.", hint="Its indices would not be checked.")
    operator = operator_named(template.operator)
    facts = facts_of(operator)
    if facts.digest != template.digest:
        raise SchemaMismatchError(f"{template.operator} has another schema in PyTorch {torch.__version__} here.",
                                  hint="Install the same PyTorch release on both sides.")
    names = [*facts.argument_names[: len(template.arguments)], *(name for name, _ in template.keywords)]
    unknown = set(names) - set(facts.argument_names)
    if unknown or len(template.arguments) > len(facts.argument_names):
        raise ProtocolError(f"{template.operator} has no arguments {sorted(unknown)}.")
    check_switches(template.switches)
    every = [*template.arguments, *(argument for _, argument in template.keywords)]
    written: list[int] = []
    position = 0
    for name, argument in zip(names, every, strict=True):
        width = count_tensors(argument)
        written += range(position, position + width) if name in facts.written else ()
        position += width
    function = _under(template.default_dtype, _FUNCTIONS.get(template.operator, operator._op))
    if facts.changes_metadata:
        positional = names[:len(template.arguments)]
        function = _growing(function, [index for index, name in enumerate(positional) if name in facts.written],
                            [name for name, _ in template.keywords if name in facts.written])
    return BoundCall(
        function=function,
        arguments=tuple(resolve(argument, device) for argument in template.arguments),
        keywords=tuple((name, resolve(argument, device)) for name, argument in template.keywords),
        returns=facts.returns,
        written_operands=tuple(written),
        numbers=sum(map(count_numbers, every)),
        is_random=facts.is_random,
        is_pure=_is_pure(operator, facts),
        draws=_draws(operator, facts),
        writes=not is_as_declared(operator) or bool(written_names(facts)),
        probabilities=dropout_numbers(template, facts),
        switches=template.switches,
    )


def _is_pure(operator: torch._ops.OpOverload, facts: SchemaFacts) -> bool:
    """Whether an operator neither writes nor draws random numbers, if its dropout probability is zero.

    Foreign operators may do anything.
    """
    return is_as_declared(operator) and not (written_names(facts) or _draws(operator, facts))


def _draws(operator: torch._ops.OpOverload, facts: SchemaFacts) -> bool:
    """Whether an operator draws random numbers, if its dropout probability is zero."""
    return torch.Tag.nondeterministic_seeded in operator.tags and not may_drop(facts)


def written_names(facts: SchemaFacts) -> frozenset[str]:
    """Return the arguments that may be written. Schemas of batch norms do not declare the statistics as written."""
    return facts.written.union(name for name in facts.argument_names if name.startswith("running_"))


def _under(default_dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function under the caller's default dtype; PyTorch has one for the whole process."""
    if not default_dtype:
        return function
    wanted = dtype_named(default_dtype)
    if not wanted.is_floating_point:
        raise ProtocolError(f"{default_dtype} is no default dtype.")

    def call(*args: Any, **kwargs: Any) -> Any:
        here = torch.get_default_dtype()
        if here == wanted:
            return function(*args, **kwargs)
        torch.set_default_dtype(wanted)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(here)

    return call


def results_of(call: BoundCall, returned: Any) -> list[Any]:
    """Return the new results of a call in the order in which a program numbers them."""
    if not call.returns:
        return []
    values = [returned] if len(call.returns) == 1 else returned
    results: list[Any] = []
    for kind, value in zip(call.returns, values, strict=True):
        if kind is ReturnKind.LIST:
            results += value
        elif kind is not ReturnKind.WRITTEN:
            results.append(value)
    return results

