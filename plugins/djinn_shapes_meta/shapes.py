"""Shape inference on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn.kinds import Inference, OutputSpec
from djinn.model.schema import ReturnKind, facts_of
from djinn.model.spec import tensors_in
from djinn_shapes_meta.rules import is_believable

_SIZED_BY_NUMBERS = ("aten::upsample_", "aten::_upsample_", "aten::arange", "aten::range", "aten::linspace",
                     "aten::logspace", "aten::histc", "aten::histogram")


class MetaShapes:
    """Runs the operator itself on tensors without data.

    Meta kernels can be missing, or stricter than the real ones. Then the answer is "cannot tell", and the executor is
    asked; a wrong call takes the same way, so its error is the very one that eager raises.
    """

    name = "meta"

    def depends_on_numbers(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a floating-point argument can change the result's metadata."""
        facts = facts_of(operator)
        takes_tensors = any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
        return not takes_tensors or facts.name.startswith(_SIZED_BY_NUMBERS)

    def infer(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inference | None:
        """Infer what ``operator(*args, **kwargs)`` returns, or ``None``."""
        facts = facts_of(operator)
        if not is_believable(facts, tensors_in((args, tuple(kwargs.values())))):
            return None
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                returned = operator(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the executor is asked instead
            # No verdict on the call: a missing meta kernel and a user's mistake look alike here. The executor decides.
            return None
        if not facts.returns:
            values: Sequence[Any] = ()
        else:
            values = (returned,) if len(facts.returns) == 1 else returned
        results: list[OutputSpec | None | tuple[OutputSpec, ...]] = []
        for kind, value in zip(facts.returns, values, strict=True):
            if kind is ReturnKind.PLAIN:
                return None
            members = value if kind is ReturnKind.LIST else (value,)
            if any(member is not None and not _is_plain_meta(member) for member in members):
                return None
            specs = tuple(OutputSpec.of(member) for member in members if member is not None)
            results.append(specs if kind is ReturnKind.LIST else specs[0] if specs else None)
        return Inference(tuple(results), tuple(map(OutputSpec.of, tensors_in((args, tuple(kwargs.values()))))))


def _is_plain_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "meta"
