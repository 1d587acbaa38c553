"""In-place and ``out=`` variants of operators, found by schema, and calls of them on drawn destinations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from djinn.ir.schema import facts_of
from djinn_conformance.families import OperatorSpec
from djinn_conformance.family_strategies import calls
from djinn_conformance.programs import RecordedCall, Recording, Ref, call
from djinn_conformance.replays import attempt_eager
from djinn_conformance.strategies import filled

__all__ = ("variant_calls", "variants_of")


def _key(operator: torch._ops.OpOverload) -> tuple[tuple[str, str], ...]:
    """Return the common part of an operator's variants: the arguments that are not destinations."""
    return tuple((argument.name, str(argument.type)) for argument in operator._schema.arguments if not argument.is_out)


def _overloads(packet: torch._ops.OpOverloadPacket | None) -> list[torch._ops.OpOverload]:
    """List the overloads that can be called; TorchScript's own operators cannot."""
    found = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in found if torch._C._dispatch_has_kernel(overload.name())]


def variants_of(spec: OperatorSpec) -> list[OperatorSpec]:
    """List the in-place and ``out=`` variants of a functional operator."""
    name = spec.operator._schema.name.removeprefix("aten::")
    others = (*_overloads(spec.operator.overloadpacket), *_overloads(getattr(torch.ops.aten, f"{name}_", None)))
    return [attrs.evolve(spec, operator=other) for other in others
            if _key(other) == _key(spec.operator) and facts_of(other).written]


def _sized(size: tuple[int, ...], wanted: torch.Tensor) -> torch.Tensor:
    return filled(size, wanted.dtype, 7)


def _strided(wanted: torch.Tensor) -> torch.Tensor:
    return filled((*wanted.shape, 2), wanted.dtype, 7)[..., 1]


def _permuted(wanted: torch.Tensor) -> torch.Tensor:
    return filled(tuple(reversed(wanted.shape)), wanted.dtype, 7).permute(tuple(reversed(range(wanted.dim()))))


_DESTINATIONS: Mapping[str, Any] = {
    "fitting": lambda wanted: _sized(tuple(wanted.shape), wanted),
    "empty": lambda wanted: _sized((0,), wanted),
    "smaller": lambda wanted: _sized((1,), wanted),
    "larger": lambda wanted: _sized((2, *wanted.shape), wanted),
    "other_dtype": lambda wanted: filled(tuple(wanted.shape), torch.float64 if wanted.dtype is torch.float32 else
                                         torch.float32, 7),
    "strided": _strided,
    "permuted": _permuted,
    "expanded": lambda wanted: _sized((1,) * wanted.dim(), wanted).expand(wanted.shape),
}
"""Creates a tensor to write a result to, given the result."""


@st.composite
def variant_calls(draw: st.DrawFn, spec: OperatorSpec) -> Recording:
    """Draw a call of an operator that may have destinations, with a drawn tensor for each."""
    outs = [argument.name for argument in spec.operator._schema.arguments if argument.is_out]
    drawn = draw(calls(spec))
    if not outs:
        return drawn
    [made] = drawn.calls
    functional = attempt_eager(attrs.evolve(drawn, calls=(attrs.evolve(made, operator=_functional(spec)),)))
    results = functional.results or (torch.zeros(0),) * len(outs)
    inputs, before, given = list(drawn.inputs), list[RecordedCall](), dict[str, Any]()
    for name, result in zip(outs, results, strict=False):
        given[name] = _destination(draw(st.sampled_from(spec.destinations)), result, inputs, before)
    return Recording(tuple(inputs), (*before, attrs.evolve(made, kwargs={**made.kwargs, **given})))


def _functional(spec: OperatorSpec) -> torch._ops.OpOverload:
    for other in _overloads(spec.operator.overloadpacket):
        if _key(other) == _key(spec.operator) and not facts_of(other).written:
            return other
    return spec.operator


def _destination(kind: str, result: Any, inputs: list[torch.Tensor], before: list[RecordedCall]) -> Ref:
    """Add a destination to the inputs, or make one of the first input."""
    first = inputs[0] if inputs else None
    if kind == "input" and first is not None:
        return Ref(-1)
    if kind == "shifted" and first is not None:
        offset = first.storage_offset()
        size, stride = list(first.size()), list(first.stride())
        before.append(call("aten::as_strided", Ref(-1), size, stride, offset - 1 if offset else offset))
        return Ref(len(before) - 1)
    wanted = result if isinstance(result, torch.Tensor) else torch.zeros(0)
    inputs.append(_DESTINATIONS.get(kind, _DESTINATIONS["fitting"])(wanted))
    return Ref(-len(inputs))
