"""Shortcuts: functions that are recorded before PyTorch's dispatch, where that has no further effect.

Between a function of the Python interface and the recorder, a call passes through PyTorch's argument parser, its
dispatcher and back into Python. Without gradients, all of that only determines the operator. So the first call of a
function with certain argument metadata takes that path and is observed; if it resulted in exactly one operation, with
the same operands and numbers in the same order, the next such call is recorded directly.

Shortcuts are not used where the path does more: with gradients, in a view or a write, under autocast, in transforms, in
dispatch modes, while tracing or profiling.

A real number may vary between calls only if nothing on the path uses it: the function must be PyTorch's own C binding
of the recorded operator. Other functions may choose the operator by the number, as attention does by the dropout
probability. In that case the number is part of the key, like all other arguments that are not tensors.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from djinn.ir.schema import ReturnKind
from djinn.kinds.interceptor import FunctionHandler
from djinn.record.call_plans import Binding, CallPlan
from djinn.record.recorder import scan
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.device.interceptor import derived_plans
from djinn_plugins.device.interceptor import matmul_decomposition as folding

if TYPE_CHECKING:
    from djinn.ir.tape import Node, Signature
    from djinn.session.session import Session

MAX_SHORTCUTS = 2048
"""Entries of each of two generations: an entry is evicted after that many others were used in the meantime."""

_LARGEST = 2**63
"""PyTorch refuses integers from here on."""

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_on = torch._C._is_any_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_is_profiling = torch._C._autograd._profiler_enabled
_is_running = runtime.is_initialized

_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

_operator_named = functools.lru_cache(4096)(operator_named)

_session: Session
_apply: Callable[..., Any]
_unknown: Any = object()
_by_value: Any = object()
"""Marker: the real numbers of a call are part of the key."""
_shortcuts: dict[tuple[Any, ...], tuple[CallPlan, list[Any] | None] | None] = {}
"""By function and arguments, as described by `djinn.record.recorder.scan`: the plan, and the operation's numbers,
including defaults, if they are the same for every such call. ``None`` where there is no shortcut. If an operation has
several results, the function returned the first one."""
_older: dict[tuple[Any, ...], Any] = {}
_under: dict[Any, tuple[Any, Any]] = {}
"""Both generations of shortcuts, by the process-wide switches under which they were learned; without those in use."""


def call_plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as PyTorch would."""
    return torch._C._disabled_torch_function_impl(function, (), args, kwargs)


def follow(session: Session) -> None:
    """Use a session that begins for learning shortcuts."""
    global _session, _apply
    _shortcuts.clear()
    _older.clear()
    _under.clear()
    _session, _apply = session, session.recorder.apply


def use_switches(before: Any, now: Any, most: int) -> None:
    """Use the shortcuts that were learned under the switches that hold now, and keep at most so many others."""
    global _shortcuts, _older
    _under[before] = _shortcuts, _older
    _shortcuts, _older = _under.pop(now, ({}, {}))
    while len(_under) > most:
        del _under[next(iter(_under))]


def _takes_the_long_way() -> bool:
    """Whether something is active that a shortcut would pass by, such as gradients, modes and profilers."""
    return (
        _is_grad_enabled()
        or _modes() > 0
        or _transform() is not None
        or _is_autocast_on()
        or forward_ad._current_level >= 0
        or _is_tracing()
        or _is_profiling()
        or not _is_running()
    )


def shortened(long_way: FunctionHandler, settings: Callable[[], Any] | None = None) -> FunctionHandler:
    """Create the handler of functions that are called by their shortcut if there is one, otherwise normally.

    Args:
        long_way: The handler without shortcuts.
        settings: Returns the settings that the path depends on besides the arguments.
    """

    def shorten(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _takes_the_long_way():
            return long_way(function, args, kwargs)
        slots: Any
        numbers: Any = ()
        hashable: tuple[Any, ...]
        count = len(args) if settings is None and not kwargs and type(args[0]) is LazyTensor else 0
        kind = type(args[1]) if count > 1 else None
        # The same results as `scan`, for the most frequent calls.
        if kind is LazyTensor and count == 2:
            one, other = args[0]._value, args[1]._value
            slots, hashable = (one.slot, other.slot), (function, one.spec, other.spec)
        elif kind is LazyTensor and count == 3 and type(args[2]) is LazyTensor:
            one, other, third = args[0]._value, args[1]._value, args[2]._value
            slots, hashable = (one.slot, other.slot, third.slot), (function, one.spec, other.spec, third.spec)
        elif count == 2 and (kind is int or kind is float):
            one, number = args[0]._value, args[1]
            slots, numbers = (one.slot,), (number,)
            hashable = (function, one.spec, number) if kind is int else (function, one.spec, float, float)
        else:
            key: list[Any] = [function] if settings is None else [function, settings()]
            slots, numbers = [], []
            ours = scan(args, key, slots, numbers, True)
            for name, item in kwargs.items():
                key.append(name)
                ours = scan((item,), key, slots, numbers, True) and ours
            if not ours:
                return long_way(function, args, kwargs)
            hashable = tuple(key)
        shortcut = _shortcuts.get(hashable, _unknown)
        if shortcut is _unknown:
            shortcut = _find(hashable)
        if shortcut is _by_value:
            hashable = (hashable, *_reals(numbers))
            shortcut = _find(hashable)
        if shortcut is None:
            return long_way(function, args, kwargs)
        if shortcut is _unknown and kind is int and count == 2 and -_LARGEST <= args[1] < _LARGEST:
            shortcut = _find((function, hashable[1], int))
        if shortcut is _unknown:
            looks = settings is not None
            return _learn(hashable, long_way, function, args, kwargs, slots, numbers, looks=looks)
        plan, fixed = shortcut
        result = _apply(plan, args, kwargs, slots, numbers if fixed is None else fixed)
        return result if plan.single is not None else result[0]

    return shorten


def recorded(function: Callable[..., Any], one: LazyTensor, other: LazyTensor | float) -> Any:
    """Record a call with two operands, the second of which may be a number, by its shortcut; ``None`` without one."""
    if _takes_the_long_way():
        return None
    first, kind = one._value, type(other)
    slots: tuple[Any, ...]
    numbers: tuple[Any, ...]
    if isinstance(other, LazyTensor):
        second = other._value
        shortcut = _shortcuts.get((function, first.spec, second.spec))
        slots, numbers = (first.slot, second.slot), ()
    else:
        slots, numbers = (first.slot,), (other,)
        key = (function, first.spec, other) if kind is int else (function, first.spec, float, float)
        shortcut = _shortcuts.get(key)
        if shortcut is None and kind is int and -_LARGEST <= other < _LARGEST:
            shortcut = _shortcuts.get((function, first.spec, int))
    if shortcut is None or shortcut is _by_value or shortcut[0].single is None:
        return None
    plan, fixed = shortcut
    return _apply(plan, (), {}, slots, numbers if fixed is None else fixed)


def _find(key: tuple[Any, ...]) -> Any:
    found = _shortcuts.get(key, _unknown)
    if found is _unknown:
        found = _older.pop(key, _unknown)
        if found is not _unknown:
            _remember(key, found)
    return found


def _remember(key: tuple[Any, ...], shortcut: Any) -> None:
    global _shortcuts, _older
    if len(_shortcuts) >= MAX_SHORTCUTS:
        _shortcuts, _older = {}, _shortcuts
    _shortcuts[key] = shortcut


def _learn(
    key: tuple[Any, ...], long_way: FunctionHandler, function: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any], slots: list[Any], numbers: list[Any], *, looks: bool,
) -> Any:
    """Call a function normally, observing whether it uses numbers, and remember the outcome."""
    pending = _session.tape.nodes
    before = len(pending)
    result = long_way(function, args, kwargs)
    if len(pending) <= before:
        # It was already sent, or nothing was recorded: the next call may show it.
        return result
    node = pending[-1]
    is_all = (
        len(pending) == before + 1
        and type(result) is LazyTensor
        and node.outputs[:1] == (result._value.slot,)
        and len(node.inputs) == len(slots)
        and all(one is other for one, other in zip(node.inputs, slots, strict=True))
        and not (_operator_named(node.signature.template.operator) in folding.OPERATORS
                 and folding.can_depend_on_gradient(*args[:2]))
    )
    plan = _plan_of(node.signature) if is_all else None
    found = None if plan is None else (plan, list(node.numbers))
    reals = _reals(numbers)
    # Keyword arguments may come in any order, so equal numbers cannot be told apart.
    is_told_apart = not kwargs or len(set(reals)) == len(reals)
    is_same = [*map(repr, node.numbers)] == [*map(repr, numbers)]
    is_lifted = is_same and is_told_apart and not looks and _binds(function, node)
    if plan is not None and is_lifted:
        ends_in_number = len(key) == 3 and type(key[2]) is int
        of_elements = ends_in_number and derived_plans.erases_integers(_binding_of(node.signature))
        _remember((*key[:2], int) if of_elements else key, (plan, None))
    elif reals and not isinstance(key[0], tuple):
        # Real numbers are not part of the key yet.
        _remember(key, _by_value)
        _remember((key, *reals), found)
    else:
        _remember(key, found)
    return result


def _binds(function: Callable[..., Any], node: Node) -> bool:
    """Whether a function is written in C and has the name of the operator that it resulted in."""
    name = node.signature.template.operator.partition("::")[2].partition(".")[0]
    return isinstance(function, _IN_C) and function.__name__.strip("_") == name


def _reals(numbers: list[Any]) -> tuple[Any, ...]:
    """List the real and complex numbers in a comparable form: zeros differ by sign; NaN equals NaN."""
    return tuple([number if type(number) is float and number and number == number else repr(number)  # noqa: PLR0124  # NaN
                  for number in numbers if type(number) is float or type(number) is complex])


def _binding_of(signature: Signature) -> Binding:
    return _session.recorder.binding(_operator_named(signature.template.operator))


def _plan_of(signature: Signature) -> CallPlan | None:
    """Return the plan of an operation that only creates new tensors, independently of its numbers."""
    binding = _binding_of(signature)
    count = len(signature.results)
    is_simple = (
        binding.facts.returns == (ReturnKind.TENSOR,) * count
        and binding.erases_floats
        and not signature.writes
        and signature.aliases == (-1,) * count
        and None not in signature.results
        and not signature.template.default_dtype
    )
    if not is_simple:
        return None
    return CallPlan(signature=signature, single=signature.results[0] if count == 1 else None, may_be_view=False,
                    asks=False, kinds=binding.facts.returns, lengths=(1,) * count, written=(None,) * count)
