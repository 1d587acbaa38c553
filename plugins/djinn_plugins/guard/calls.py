"""Checks before a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn_plugins.common.kinds.guard import Prepared
from djinn_plugins.common.operators.operators import is_as_declared
from djinn_plugins.common.sparse.operators import NAMESPACE as SPARSE
from djinn_plugins.common.sparse.rebuilding import needed_bytes
from djinn_plugins.guard.dtypes import dtype_rule
from djinn_plugins.guard.faults import FAULTS, INTO_OUT
from djinn_plugins.guard.kernels import RULES, Rule
from djinn_plugins.guard.layouts import Arrangement, arrangement_of, base_of
from djinn_plugins.guard.loops import LOOPS
from djinn_plugins.guard.preconditions import KernelError, too_large
from djinn_plugins.guard.sizes import RESULT_BYTES, size_rule

__all__ = ("CallChecker", "check_of")


@attrs.frozen(eq=False)
class CallChecker:
    """Checks one call; see `djinn_plugins.common.kinds.guard.CallCheck`.

    Attributes:
        operator: The operator.
        base: Its name without namespace and overload.
        names: Names of its arguments.
        defaults: Their default values.
        arrange: Rearranges the operands in memory, if needed.
        rules: Conditions on the arguments.
        size_of: Computes how many bytes the call would allocate, if that depends on elements.
        limit_bytes: Maximum allocation of a call, where that depends on elements; 0 for no limit.
    """

    operator: torch._ops.OpOverload
    base: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    arrange: Arrangement | None
    rules: tuple[Rule, ...]
    size_of: Callable[[Mapping[str, Any]], int] | None
    limit_bytes: int

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared | None:
        """Check the call; return replacement arguments, if any. Raises the error that the kernel should raise."""
        prepared = None if self.arrange is None else self.arrange(args, kwargs)
        if self.rules or self.size_of is not None:
            if prepared is None:
                self.expect(args, kwargs)
            else:
                self.expect(prepared.args, prepared.kwargs)
        return prepared

    def expect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise the error that the kernel should raise, if a rule is violated."""
        named = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        base = self.base
        try:
            for rule in self.rules:
                rule(named)
            size_bytes = 0 if self.size_of is None else self.size_of(named)
        except KernelError as error:
            raise RuntimeError(str(error)) from None
        except RuntimeError as error:
            raise RuntimeError(f"{base}: {error}.") from None
        except (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
            # A rule that fails on an argument was given one of another kind, or too few arguments.
            raise RuntimeError(f"{base}: the arguments do not fit ({type(error).__name__}: {error}).") from None
        if self.limit_bytes and size_bytes > self.limit_bytes:
            raise too_large(self.operator.name(), size_bytes, 0, self.limit_bytes)


def check_of(operator: torch._ops.OpOverload, limit_bytes: int) -> CallChecker | None:
    """Return the check for an overload; ``None`` if its kernel needs none."""
    base = base_of(operator)
    is_own = is_as_declared(operator)
    given = {argument.name for argument in operator._schema.arguments}
    # Only overloads with `rounding_mode` divide integers as such, and only a given `out` can have a bad layout.
    has_none = (base.startswith("div") and "rounding_mode" not in given) or (base in INTO_OUT and "out" not in given)
    fault = None if has_none else FAULTS.get(base)
    found = (RULES.get(base), fault, LOOPS.get(base), size_rule(operator, base), dtype_rule(base))
    rules = tuple(rule for rule in found if rule is not None and is_own)
    arrange = arrangement_of(operator, limit_bytes)
    size_of = RESULT_BYTES.get(base) if is_own else needed_bytes if operator.namespace == SPARSE else None
    if arrange is None and not rules and size_of is None:
        return None
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return CallChecker(operator, base, tuple(argument.name for argument in arguments), defaults, arrange, rules,
                       size_of, limit_bytes)
