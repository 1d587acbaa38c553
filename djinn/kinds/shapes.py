"""Shape inference: the metadata of an operation's results, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs
import torch

TensorPlaceholder: TypeAlias = torch.Tensor
"""A tensor on the meta device with the size, stride, offset and dtype of an argument."""


@attrs.frozen
class OutputSpec:
    """Metadata of one result, in PyTorch's terms."""

    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OutputSpec:
        """Read the metadata of a tensor."""
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@attrs.frozen
class Inference:
    """The effect of an operation on metadata.

    Attributes:
        results: One entry per value of its schema's returns; ``None`` for an absent tensor, a tuple for a list of
            tensors.
        arguments: Metadata of the tensor arguments afterwards, in order of appearance; differs from before only for
            operations such as ``resize_`` and ``out=``.
    """

    results: tuple[OutputSpec | None | tuple[OutputSpec, ...], ...]
    arguments: tuple[OutputSpec, ...]


class ShapeInference(Protocol):
    """Infers metadata."""

    name: str
    """Name in the configuration."""

    def depends_on_numbers(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a floating-point argument's value can change the result's metadata.

        For most operators this is false: their result is cached once for all learning rates.

        Laws:
            shapes.numbers_declared
        """

    def infer(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inference | None:
        """Infer what ``operator(*args, **kwargs)`` returns.

        Args:
            operator: The overload.
            args: Positional arguments; every tensor is a `TensorPlaceholder` made for this call, every device is meta.
            kwargs: Keyword arguments, likewise.

        Returns:
            The result, or ``None`` if this plugin cannot determine it. In that case the executor is asked, which also
            raises the same exception as eager for an invalid call. A result must never be a guess.

        Laws:
            shapes.equals_eager, shapes.layouts_equal, shapes.elementwise_layouts, shapes.arguments_reported,
            shapes.no_guess, shapes.wrong_calls_unanswered, shapes.deterministic, shapes.process_untouched,
            shapes.threads

        Concurrency:
            Any thread may call this, outside autograd and all modes.
        """
