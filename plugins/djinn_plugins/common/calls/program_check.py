"""Checks a program that a client has defined, before anything reads it."""

from __future__ import annotations

from djinn.errors import ProtocolError
from djinn.ir.program import MAX_STEPS, Program, Template, count_tensors

__all__ = ("check_program",)


def check_program(program: Program) -> None:
    """Check that every index of a program is valid.

    Raises:
        ProtocolError: An index is invalid. Nothing was executed.
    """
    if len(program.steps) > MAX_STEPS:
        raise ProtocolError(f"A program of {len(program.steps)} steps; {MAX_STEPS} is the limit.")
    arities = [_arity(template) for template in program.templates]
    produced = 0
    for position, step in enumerate(program.steps):
        if not 0 <= step.template < len(arities):
            raise ProtocolError(f"Step {position} uses template {step.template} of {len(arities)}.")
        if len(step.operands) != arities[step.template]:
            raise ProtocolError(f"Step {position} has {len(step.operands)} operands, its template "
                                f"{arities[step.template]}.")
        for operand in step.operands:
            if not -program.inputs <= operand < produced:
                raise ProtocolError(f"Step {position} uses operand {operand}, which does not exist there.")
        if step.results < 0:
            raise ProtocolError(f"Step {position} has {step.results} results.")
        produced += step.results
    if any(not 0 <= index < produced for index in program.keep):
        raise ProtocolError("The program keeps a result that it does not have.")
    if any(later <= earlier for earlier, later in zip(program.keep, program.keep[1:], strict=False)):
        raise ProtocolError("The kept results are not in rising order.")


def _arity(template: Template) -> int:
    return sum(count_tensors(argument) for argument in (*template.arguments, *(a for _, a in template.keywords)))
