"""What is asked before a call is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.kinds import Prepared
from djinn_guard_core.expectations import too_large
from djinn_guard_core.faults import FAULTS, JOINING
from djinn_guard_core.kernels import RULES, Rule
from djinn_guard_core.layouts import Arrangement, arrangement_of, base_of
from djinn_guard_core.sizes import RESULT_BYTES, size_rule

__all__ = ("Asked", "check_of")


@attrs.frozen(eq=False)
class Asked:
    """Checks one call; see `djinn.kinds.guard.CallCheck`.

    Attributes:
        operator: The operator.
        base: Its name without namespace and overload.
        names: Names of its arguments.
        defaults: Those that it has.
        arrange: Tells where its operands have to lie, if not where they are.
        rules: What must hold.
        size_of: Tells how many bytes it would allocate, if that takes a look at elements.
        limit_bytes: What a call may allocate, where that takes a look at elements; 0 for anything.
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
        """Raise what the kernel should, if it must not be called; return what it is to be called with instead."""
        prepared = None if self.arrange is None else self.arrange(args, kwargs)
        if self.rules or self.size_of is not None:
            if prepared is None:
                self.expect(args, kwargs)
            else:
                self.expect(prepared.args, prepared.kwargs)
        return prepared

    def expect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the kernel should, if a rule does not hold."""
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
    is_own = operator.namespace == "aten"
    given = {argument.name for argument in operator._schema.arguments}
    # Only whole numbers are divided in another way than others, and only what is given is not laid out by the kernel.
    has_none = (base.startswith("div") and "rounding_mode" not in given) or (base in JOINING and "out" not in given)
    fault = None if has_none else FAULTS.get(base)
    rules = tuple(rule for rule in (RULES.get(base), fault, size_rule(operator, base)) if rule is not None and is_own)
    arrange = arrangement_of(operator, limit_bytes)
    size_of = RESULT_BYTES.get(base) if is_own else None
    if arrange is None and not rules and size_of is None:
        return None
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return Asked(operator, base, tuple(argument.name for argument in arguments), defaults, arrange, rules, size_of,
                 limit_bytes)
