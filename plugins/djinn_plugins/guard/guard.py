"""The guard: checks programs when they are defined, runs before they start, and some calls right before they are made.

A program's operators must be allowed, and its calls must match their schemas. For kernels that do not check their
arguments, the guard checks the actual arguments before the call. It estimates the memory of a run in advance, from
metadata alone. The result for one step is cached and applies to all similar steps, so a loop costs one lookup per step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from djinn.errors import ProtocolError, SchemaMismatchError
from djinn.ir.program import Program, Template, count_tensors
from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds import ShapeInference
from djinn_plugins.common.calls.switches import check_switches
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.guard.allowlist import require_allowed
from djinn_plugins.guard.calls import check_of
from djinn_plugins.guard.estimate import Answers, Called
from djinn_plugins.guard.runs import CheckedSteps
from djinn_plugins.guard.schema_check import check_form, number_kinds
from djinn_plugins.guard.sizes import MAX_RESULTS

__all__ = ("CoreGuard",)

MAX_VALUES = 2**22
"""Maximum number of inputs and results of a program."""
MAX_TEMPLATES = 2**16
MAX_OPERANDS = 2**16
"""Maximum number of tensors that one call takes."""


class CoreGuard:
    """Permits everything that eager PyTorch does with valid arguments, and no access beyond that."""

    name = "core"

    def __init__(self) -> None:
        self._is_warm = False

    def prepare(self) -> None:
        """Make PyTorch import its meta kernels; see `djinn_plugins.common.kinds.guard.SupportsPreparation`."""
        self._is_warm = True
        _warm_up()

    def watch(self, bounds: Bounds, shapes: ShapeInference) -> CoreWatch:
        """Start the watch over a new session."""
        if not self._is_warm:
            self._is_warm = True
            # PyTorch imports its meta kernels on first use, which takes a second or two. The thread is no daemon: an
            # interpreter that exits beneath PyTorch would abort the process. an interpreter that ends beneath PyTorch
            # would end the process by force.
            threading.Thread(target=_warm_up, name="djinn-guard-warm").start()
        return CoreWatch(bounds, shapes)


def _warm_up() -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        torch.ops.aten.any(torch.empty(1, device="meta"))
        torch.ops.aten.isin.Tensor_Tensor(*(torch.empty(1, device="meta") for _ in range(2)))


class CoreWatch:
    """The guard of one session; see `djinn_plugins.common.kinds.guard.ProgramChecker`."""

    def __init__(self, bounds: Bounds, shapes: ShapeInference) -> None:
        self._bounds = bounds
        self._answers = Answers(shapes)
        self._called: dict[Template, Called] = {}

    def check(self, program: Program) -> CheckedSteps:
        """Check a program; see `djinn_plugins.common.kinds.guard.ProgramChecker.check`."""
        if len(program.templates) > MAX_TEMPLATES:
            raise ProtocolError(f"A program of {len(program.templates)} templates; {MAX_TEMPLATES} is the limit.")
        called = [self._look_at(template) for template in program.templates]
        produced = 0
        for position, step in enumerate(program.steps):
            _check_results(called[step.template], step.results, position)
            if len(step.operands) > MAX_OPERANDS:
                raise ProtocolError(f"Step {position} has {len(step.operands)} operands; {MAX_OPERANDS} is the limit.")
            produced += step.results
        if produced + program.inputs > MAX_VALUES:
            raise ProtocolError(f"A program of {produced + program.inputs} values; {MAX_VALUES} is the limit.")
        return CheckedSteps(program, called, self._answers, self._bounds)

    def _look_at(self, template: Template) -> Called:
        found = self._called.get(template)
        if found is not None:
            return found
        operator = operator_named(template.operator)
        require_allowed(operator, self._bounds.namespaces)
        facts = facts_of(operator)
        if facts.digest != template.digest:
            raise SchemaMismatchError(f"{template.operator} has another schema in PyTorch {torch.__version__} here.",
                                      hint="Install the same PyTorch release on both sides.")
        check_switches(template.switches)
        given = check_form(template, operator, facts)
        kinds = number_kinds(given, operator)
        keeps_reals = self._answers.depends_on_reals(operator)
        made = Called(
            number=len(self._called), operator=operator, facts=facts, given=given, positional=len(template.arguments),
            check=check_of(operator, self._bounds.program_bytes), default_dtype=template.default_dtype,
            aliases=_aliases(facts.aliases, given), numbers=len(kinds),
            matters=tuple(index for index, is_real in enumerate(kinds) if keeps_reals or not is_real),
            has_device=any(argument.name == "device" and argument.kwarg_only
                           for argument in operator._schema.arguments))
        if len(self._called) >= MAX_TEMPLATES:
            raise ProtocolError(f"A session with more than {MAX_TEMPLATES} templates.")
        self._called[template] = made
        return made


def _aliases(aliases: Sequence[str | None], given: Sequence[tuple[str, Any]]) -> tuple[tuple[int, ...], ...]:
    ranges: dict[str | None, tuple[int, ...]] = {}
    position = 0
    for name, form in given:
        width = count_tensors(form)
        ranges[name] = tuple(range(position, position + width))
        position += width
    return tuple(ranges.get(alias, ()) for alias in aliases)


def _check_results(called: Called, results: int, position: int) -> None:
    kinds = called.facts.returns
    fixed = sum(kind in (ReturnKind.TENSOR, ReturnKind.PLAIN) for kind in kinds)
    has_list = ReturnKind.LIST in kinds
    if results < fixed or (results > fixed and not has_list) or results > MAX_RESULTS:
        raise ProtocolError(f"Step {position} has {results} results; {called.operator.name()} gives "
                            f"{fixed}{' or more' if has_list else ''}, and {MAX_RESULTS} is the limit.")
