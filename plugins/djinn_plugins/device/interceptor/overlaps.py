"""Operators that write a tensor: where its memory is also read, eager may refuse the call, at its line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from djinn.ir.schema import ReturnKind, SchemaFacts, facts_of
from djinn.ir.spec import tensors_in
from djinn.kinds import OperationClass
from djinn.kinds.interceptor import Handler
from djinn.record.tensor import LazyTensor
from djinn.wire.tensors import is_dense

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("WithWrites", "ask", "is_refused_overlap")


class WithWrites(dict[Any, Handler]):
    """Handlers, with one for each further operator that writes a tensor and has other arguments.

    Args:
        session: For which the handlers are.
        handlers: Those that operators have for themselves.
    """

    def __init__(self, session: Session, handlers: dict[Any, Handler]) -> None:
        super().__init__(handlers)
        self._session = session

    def __contains__(self, operator: Any) -> bool:
        return super().__contains__(operator) or self._writer(operator) is not None

    def __missing__(self, operator: Any) -> Handler:
        writer = self._writer(operator)
        if writer is None:
            raise KeyError(operator)
        return writer

    def _writer(self, operator: Any) -> Handler | None:
        facts, classifier = facts_of(operator), self._session.classifier
        if (not (facts.written or facts.changes_metadata) or len(facts.argument_names) < 2
                or ReturnKind.PLAIN in facts.returns or classifier.classify(operator) is OperationClass.TRIGGER
                or (facts.is_composite and not classifier.keep_whole(operator))):
            return None
        if facts.changes_metadata:
            return record_changing
        writes_first = facts.argument_names[0] in facts.written and ReturnKind.WRITTEN in facts.returns
        return record_writing if writes_first else None


def record_writing(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a write in place be recorded, unless eager may refuse it."""
    target = args[0]
    if type(target) is not LazyTensor:
        return NotImplemented
    storage = target._value.slot.storage
    for item in (*args[1:], *kwargs.values()) if kwargs else args[1:]:
        for read in (item,) if type(item) is LazyTensor else item if type(item) is list else ():
            if type(read) is LazyTensor and read._value.slot.storage == storage and is_refused_overlap(
                operator, target, read):
                return ask(session, operator, args, kwargs)
    return NotImplemented


def record_changing(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let an operation be recorded that may change a tensor's metadata, unless eager may refuse it."""
    slots, _ = session.recorder.take_apart(args, kwargs)
    if not len({slot.storage for slot in slots}) < len(slots) == len(tensors_in((args, tuple(kwargs.values())))):
        return NotImplemented
    plan = session.planner.plan(session.recorder.binding(operator), operator, args, kwargs)
    return ask(session, operator, args, kwargs) if plan.changes or _overlap_in(
        operator, facts_of(operator), args, kwargs) else NotImplemented


def ask(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the executor carry out a call now, and raise the exception of eager."""
    slots, numbers = session.recorder.take_apart(args, kwargs)
    plan = session.planner.plan(session.recorder.binding(operator), operator, args, kwargs)
    return session.ask(plan, operator, args, kwargs, slots, numbers)[0]


def _overlap_in(operator: Any, facts: SchemaFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
    written = tensors_in([item for name, item in named.items() if name in facts.written])
    read = tensors_in([item for name, item in named.items() if name not in facts.written])
    return any(isinstance(one, LazyTensor) and isinstance(other, LazyTensor)
               and is_refused_overlap(operator, one, other) for one in written for other in read)


def is_refused_overlap(operator: Any, written: LazyTensor, read: LazyTensor) -> bool:
    """Whether two arguments share memory in a way that operators may refuse.

    Operators on elements allow that both are the same memory. Of tensors with gaps, PyTorch does not tell.

    Source:
        ``get_overlap_status`` in aten/src/ATen/MemoryOverlap.cpp.
    """
    one, other = written._value, read._value
    if one.slot.storage != other.slot.storage:
        return False
    first, second = one.spec, other.spec
    if one.slot is other.slot or first is second:
        return torch.Tag.pointwise not in operator.tags and operator is not torch.ops.aten.copy_.default
    if not (first.numel and second.numel and is_dense(tuple(first.size), first.stride)
            and is_dense(tuple(second.size), second.stride)):
        return False
    begin, start = first.storage_offset * first.dtype.itemsize, second.storage_offset * second.dtype.itemsize
    return begin < start + second.numel * second.dtype.itemsize and start < begin + first.numel * first.dtype.itemsize
