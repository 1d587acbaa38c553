"""What is asked before a call is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.errors import ProgramTooLargeError
from djinn_guard_core.kernels import RULES, VALUES, Rule
from djinn_guard_core.sizes import READS_VALUES, RESULT_BYTES, size_rule

__all__ = ("Asked", "base_of", "check_of", "too_large")


def base_of(operator: torch._ops.OpOverload) -> str:
    """Name an operator without namespace and overload."""
    return str(operator.name()).partition("::")[2].partition(".")[0]


def too_large(what: str, size_bytes: int, held_bytes: int, limit_bytes: int) -> ProgramTooLargeError:
    """Say that a call would take too much memory."""
    beside = f" beside the {held_bytes} that the program holds then" if held_bytes else ""
    return ProgramTooLargeError(f"{what} would take {size_bytes} bytes{beside}; {limit_bytes} are allowed.",
                                hint="Work in smaller pieces, or raise the server's --program-mib.")


@attrs.frozen(eq=False)
class Asked:
    """Checks one call; see `djinn.kinds.guard.CallCheck`.

    Attributes:
        operator: The operator.
        base: Its name without namespace and overload.
        names: Names of its arguments.
        defaults: Those that it has.
        rules: What must hold.
        size_of: Tells how many bytes it would allocate, if that takes a look at elements.
        limit_bytes: What a call may allocate, where that takes a look at elements; 0 for anything.
        reads_values: Whether elements are looked at.
    """

    operator: torch._ops.OpOverload
    base: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    rules: tuple[Rule, ...]
    size_of: Callable[[Mapping[str, Any]], int] | None
    limit_bytes: int
    reads_values: bool

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the kernel should, if it must not be called."""
        named = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        base = self.base
        try:
            for rule in self.rules:
                rule(named)
            size_bytes = 0 if self.size_of is None else self.size_of(named)
        except RuntimeError as error:
            raise RuntimeError(f"{base}: {error}.") from None
        except (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
            # A rule that cannot even look at an argument has been given something of another kind or too few of it.
            raise RuntimeError(f"{base}: the arguments do not fit ({type(error).__name__}: {error}).") from None
        if self.limit_bytes and size_bytes > self.limit_bytes:
            raise too_large(self.operator.name(), size_bytes, 0, self.limit_bytes)


def check_of(operator: torch._ops.OpOverload, limit_bytes: int) -> Asked | None:
    """Return what must be asked before an overload is called; ``None`` if its kernel looks after itself."""
    base = base_of(operator)
    rules = tuple(rule for rule in (RULES.get(base), size_rule(operator, base)) if rule is not None)
    if not operator.name().startswith("aten::") or not (rules or base in RESULT_BYTES):
        return None
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return Asked(operator, base, tuple(argument.name for argument in arguments), defaults, rules,
                 RESULT_BYTES.get(base), limit_bytes, base in VALUES or base in READS_VALUES)
