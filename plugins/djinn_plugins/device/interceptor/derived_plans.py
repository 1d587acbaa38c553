"""Plans of calls that differ from a known one only in where operands begin in memory, or in an index.

A loop over the elements of a tensor makes such calls. Their metadata follows from that of the known call: a view is
moved as far as its base is, and a new tensor is laid out as before. A few operators (``aten::select_scatter``) copy an
operand with its offset; a plan shows this only if its operands do not begin at zero. So each plan holds for the
operands that begin at zero where its own do, and is not kept if a new tensor begins elsewhere. The results of indices
and slices follow from the sizes and strides of the operand. So nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from djinn.ir.tape import Signature
from djinn.record.call_plans import Binding, CallPlan
from djinn.record.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec
    from djinn.session.session import Session

MAX_KNOWN = 2048
"""Entries of each of two generations, as in the recorder."""
_REALS, _NUMBERS = (float, complex), (float, complex, int)
_OF_ELEMENTS = frozenset(
    "add sub rsub mul div eq ne lt le gt ge fill clamp clamp_min clamp_max masked_fill where addcmul "
    "addcdiv bitwise_and bitwise_or bitwise_xor".split())
"""Operators, also in place, whose integers are all elements; none that refuse some, as ``pow`` and divisions do."""
_Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int]"
_LAST = 2**63 - 1


def follow(session: Session) -> None:
    """Derive plans for a session that begins."""
    session.recorder.plan = DerivedPlans(session, session.recorder.plan).plan


class DerivedPlans:
    """Makes plans: by a rule or from a known plan where that is possible, otherwise by inference.

    Args:
        session: The session.
        infer: Makes a plan by inference.
    """

    def __init__(self, session: Session, infer: Callable[..., CallPlan]) -> None:
        self._infer = infer
        self._intern = session.specs.intern
        self._check_owner = session.check_owner
        self._ruled: dict[tuple[Any, ...], CallPlan] = {}
        self._known: dict[tuple[Any, ...], CallPlan] = {}
        self._older: dict[tuple[Any, ...], CallPlan] = {}

    def plan(self, binding: Binding, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """Return the plan of a call."""
        name = binding.facts.name
        rule = _RULES.get(name)
        if rule is not None and not kwargs:
            form = (binding, *map(type, args))
            known = self._ruled.get(form)
            if known is None:
                return self._first(form, binding, operator, args)
            layout = rule(args[0]._value.spec, *args[1:])
            return self._infer(binding, operator, args, kwargs) if layout is None else self._viewed(
                known, args[0], layout)
        if binding.facts.changes_metadata or "as_strided" in name:
            return self._infer(binding, operator, args, kwargs)
        key: list[Any] = [binding]
        tensors: list[LazyTensor] = []
        erased = _NUMBERS if erases_integers(binding) else _REALS if binding.erases_floats else ()
        _scan(args, key, tensors, erased)
        for word, item in kwargs.items():
            key.append(word)
            _scan((item,), key, tensors, erased)
        hashable = tuple(key)
        known = self._known.get(hashable) or self._older.get(hashable)
        if known is not None and (known.single is not None or not known.is_stale):
            return self._derived(known, tensors)
        made = self._infer(binding, operator, args, kwargs)
        if not (made.asks or made.changes):
            self._remember(hashable, made)
        return made

    def _first(self, form: tuple[Any, ...], binding: Binding, operator: Any, args: tuple[Any, ...]) -> CallPlan:
        """Infer the first call of this form; later ones have a rule, if their other arguments are plain integers."""
        made = self._infer(binding, operator, args, {})
        if not made.asks and form[1] is LazyTensor and all(kind in (int, type(None)) for kind in form[2:]):
            self._ruled[form] = made
        return made

    def _viewed(self, known: CallPlan, base: LazyTensor, layout: _Layout) -> CallPlan:
        self._check_owner(base)
        spec = base._value.spec
        size, stride, offset = layout
        result = self._intern(torch.Size(size), stride, offset, spec.dtype, spec.device)
        return _like(known, (result,), (spec,))

    def _derived(self, known: CallPlan, tensors: Sequence[LazyTensor]) -> CallPlan:
        for tensor in tensors:
            self._check_owner(tensor)
        old = known.signature
        operands = tuple([tensor._value.spec for tensor in tensors])
        if operands == old.operands:
            return known
        results = old.results
        if known.may_be_view:
            results = tuple([
                result if result is None or alias < 0 else self._moved(result, old.operands[alias], operands[alias])
                for result, alias in zip(results, old.aliases, strict=True)])
        return _like(known, results, operands)

    def _moved(self, result: TensorSpec, base: TensorSpec, now: TensorSpec) -> TensorSpec:
        """Return the metadata of a view of a tensor that begins elsewhere."""
        offset = result.storage_offset + now.storage_offset - base.storage_offset
        return self._intern(result.size, result.stride, offset, result.dtype, result.device)

    def _remember(self, key: tuple[Any, ...], plan: CallPlan) -> None:
        signature = plan.signature
        if any(result is not None and alias >= 0 and result.dtype != signature.operands[alias].dtype
               for result, alias in zip(signature.results, signature.aliases, strict=True)):
            # The offset counts elements, whose size is another.
            return
        if any(result is not None and alias < 0 and result.storage_offset
               for result, alias in zip(signature.results, signature.aliases, strict=True)):
            # It begins where an operand does.
            return
        if len(self._known) >= MAX_KNOWN:
            self._known, self._older = {}, self._known
        self._known[key] = plan


def _like(known: CallPlan, results: tuple[TensorSpec | None, ...], operands: tuple[TensorSpec, ...]) -> CallPlan:
    old = known.signature
    signature = Signature(old.template, old.template_number, results, old.aliases, old.writes, old.is_random, operands,
                          old.phase)
    return CallPlan(signature, None if known.single is None else results[0], known.may_be_view, False, known.kinds,
                    known.lengths, known.written)


def erases_integers(binding: Binding) -> bool:
    """Whether the value of a plain integer never affects the metadata of an operator's results.

    This holds where an integer stands for an element: PyTorch's rules of promotion look at its type only.
    """
    name, _, overload = binding.facts.name.partition("::")[2].partition(".")
    return binding.erases_floats and name.rstrip("_") in _OF_ELEMENTS and not overload.endswith("_mode")


def _scan(items: Sequence[Any], key: list[Any], tensors: list[LazyTensor], erased: Sequence[type]) -> None:
    """Describe arguments as `djinn.record.recorder.scan` does; of offsets, only whether they are zero.

    Of numbers of an erased type, only the type counts.
    """
    for item in items:
        kind = type(item)
        if isinstance(item, LazyTensor):
            spec = item._value.spec
            key += (kind, spec.size, spec.stride, spec.dtype, spec.device, not spec.storage_offset)
            tensors.append(item)
        elif isinstance(item, (list, tuple)):
            key += (list, len(item))
            _scan(item, key, tensors, erased)
        else:
            key += (kind, None if kind in erased else item)


def _select(base: TensorSpec, dim: int, index: int) -> _Layout | None:
    size, stride = base.size, base.stride
    rank = len(size)
    if not -rank <= dim < rank:
        return None
    dim = dim % rank
    extent = size[dim]
    if not -extent <= index < extent:
        return None
    offset = base.storage_offset + index % extent * stride[dim]
    return size[:dim] + size[dim + 1:], stride[:dim] + stride[dim + 1:], offset


def _slice(
    base: TensorSpec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> _Layout | None:
    size, stride = base.size, base.stride
    if not -len(size) <= dim < len(size) or step <= 0:
        return None
    dim %= len(size)
    extent = size[dim]
    begin = _bounded(0 if start is None else start, 0, extent)
    stop = _bounded(_LAST if end is None else end, begin, extent)
    length = -(-(stop - begin) // step)
    return ((*size[:dim], length, *size[dim + 1:]), (*stride[:dim], stride[dim] * step, *stride[dim + 1:]),
            base.storage_offset + begin * stride[dim])


def _bounded(place: int, least: int, extent: int) -> int:
    return min(max(place + extent if place < 0 else place, least), extent)


_RULES: dict[str, Callable[..., _Layout | None]] = {"aten::select.int": _select, "aten::slice.Tensor": _slice}
