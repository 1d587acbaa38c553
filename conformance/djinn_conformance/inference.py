"""Queries shape inference about recorded calls, and records the metadata that eager gives for the same calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from djinn.ir.schema import facts_of
from djinn.kinds import Inference, OutputSpec, ShapeInference
from djinn_conformance.oracle import copied, seeded
from djinn_conformance.programs import RecordedCall, Recording, fill, new_results, refs_in, written_refs

__all__ = ("InferredCall", "ask", "asked_calls", "placeholder")

_META, _CPU = torch.device("meta"), torch.device("cpu")


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Create a tensor without data that has another tensor's size, stride, offset and dtype."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(length, dtype=tensor.dtype, device=_META)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@attrs.frozen
class InferredCall:
    """One call, the inferred result, and the result in eager mode.

    Attributes:
        call: The call.
        answer: The inferred result; an exception if inference raised.
        wanted: The effect on metadata in eager mode; ``None`` if results are not tensors.
        refused: The exception in eager mode, if there was one.
    """

    call: RecordedCall
    answer: Inference | Exception | None
    wanted: Inference | None
    refused: Exception | None = None


def ask(shapes: ShapeInference, call: RecordedCall, values: dict[int, Any]) -> Inference | Exception | None:
    """Query a call on the current values.

    A call that writes a tensor which it also reads is not queried: a placeholder cannot be two arguments.
    """
    tensors = [values[ref.index] for ref in refs_in([call.args, call.kwargs])]
    if written_refs(call) and len(set(map(id, tensors))) < len(tensors):
        return None

    def stand_in(ref: Any) -> Any:
        value = values[ref.index]
        return placeholder(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = fill(call.args, stand_in, _META), fill(call.kwargs, stand_in, _META)
    try:
        return shapes.infer(call.operator, args, kwargs)
    except Exception as error:  # noqa: BLE001  # any exception of a plugin is a result to be judged
        return error


def asked_calls(shapes: ShapeInference, recording: Recording) -> Iterator[InferredCall]:
    """Query every call of a recording, and execute it afterwards."""
    values: dict[int, Any] = {-1 - index: copied(tensor, _CPU) for index, tensor in enumerate(recording.inputs)}
    produced = 0
    with torch.no_grad(), seeded(_CPU, 0):
        for call in recording.calls:
            answer = ask(shapes, call, values)
            args = fill(call.args, lambda ref: values[ref.index], _CPU)
            kwargs = fill(call.kwargs, lambda ref: values[ref.index], _CPU)
            try:
                returned = call.operator(*args, **kwargs)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                yield InferredCall(call, answer, None, error)
                return
            tensors = [values[ref.index] for ref in refs_in([call.args, call.kwargs])]
            yield InferredCall(call, answer, _observed(call, returned, tensors))
            for result in new_results(call.operator, returned):
                values[produced] = result
                produced += 1


def _observed(call: RecordedCall, returned: Any, arguments: list[torch.Tensor]) -> Inference | None:
    kinds = facts_of(call.operator).returns
    values = () if not kinds else (returned,) if len(kinds) == 1 else returned
    results: list[OutputSpec | None | tuple[OutputSpec, ...]] = []
    for value in values:
        if value is None:
            results.append(None)
        elif isinstance(value, torch.Tensor):
            results.append(OutputSpec.of(value))
        elif isinstance(value, (list, tuple)) and all(isinstance(member, torch.Tensor) for member in value):
            results.append(tuple(OutputSpec.of(member) for member in value))
        else:
            return None
    return Inference(tuple(results), tuple(map(OutputSpec.of, arguments)))
