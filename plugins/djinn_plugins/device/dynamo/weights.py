"""Remote copies of parameters and buffers, shared by all compiled graphs that use them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from djinn.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec
    from djinn.record.tensor import LazyTensor
    from djinn.session.session import Session

_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNCOUNTED = -1
"""Version of a tensor whose writes PyTorch does not count; its copy is never considered up to date."""


def check(tensor: torch.Tensor) -> None:
    """Check that a tensor can be used remotely.

    Raises:
        UnsupportedTensorError: It is on another device, or not dense.
    """
    if type(tensor) not in _ORDINARY or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"The backend djinn takes ordinary dense tensors on the CPU, not a {type(tensor).__name__} on "
            f"{tensor.device} with layout {tensor.layout}.",
            hint="Move it with .cpu(), or to remote_accelerator:0, or make it dense with .to_dense() first.")


class Weight:
    """The remote copy of one ordinary tensor; it is freed with the last compiled graph that uses it."""

    __slots__ = ("__weakref__", "_tensor", "address", "lazy", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor, _notice)
        self.version = _UNCOUNTED
        self.address = 0
        self.lazy: LazyTensor | None = None

    def follow(self, session: Session, tensor: torch.Tensor) -> LazyTensor:
        """Return the copy; upload it again if the tensor or the session has changed since."""
        lazy = self.lazy
        version = _version_of(tensor)
        if (
            lazy is None
            or version == _UNCOUNTED
            or version != self.version
            or tensor.data_ptr() != self.address
            or lazy._value.released is not session.recorder.released
            or (lazy.dtype, lazy.shape) != (tensor.dtype, tensor.shape)
        ):
            check(tensor)
            lazy = session.upload(tensor)
            self.lazy, self.address, self.version = lazy, tensor.data_ptr(), version
        return lazy

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is the copy of exactly this tensor."""
        return self._tensor() is tensor

    def forget(self) -> None:
        """Mark for a new upload at the next use."""
        self.version, self.lazy = _UNCOUNTED, None
        _notice()


class RemoteWeights:
    """The remote copies of the parameters and buffers of one compiled graph.

    There may be hundreds, and they rarely change, so the data that a call needs is precomputed.

    Attributes:
        lazy: The copies.
        handles: Their handles.
        form: A number that stands for their metadata; equal for equal metadata.
    """

    def __init__(self) -> None:
        self.lazy: list[LazyTensor] = []
        self.handles: list[int] = []
        self.form = 0
        self._forms: dict[tuple[TensorSpec, ...], int] = {}
        self._weights: list[Weight] = []
        self._seen: Any = None

    def follow(self, session: Session, tensors: Sequence[torch.Tensor]) -> None:
        """Upload the tensors that have changed since the last time."""
        seen = self._look(session, tensors)
        if seen is not None and seen == self._seen:
            return
        weights = [weight_of(tensor) for tensor in tensors]
        self.lazy = [weight.follow(session, tensor) for weight, tensor in zip(weights, tensors, strict=True)]
        self.handles = [tensor._value.slot.number for tensor in self.lazy]
        self.form = self._forms.setdefault(tuple(tensor._value.spec for tensor in self.lazy), len(self._forms))
        # Release the previous references only now, so that a copy in both lists is not freed in between.
        self._weights = weights
        self._seen = self._look(session, tensors)

    def written_on_both_sides(self, index: int, tensor: torch.Tensor) -> None:
        """Record that a copy and its tensor have received the same new values."""
        self._weights[index].version = _version_of(tensor)

    def forget(self, indices: Iterable[int]) -> None:
        """Mark these for a new upload at the next use."""
        for index in indices:
            self._weights[index].forget()

    def forget_all(self) -> None:
        """Mark all for a new upload at the next use."""
        self.forget(range(len(self._weights)))

    @staticmethod
    def _look(session: Session, tensors: Sequence[torch.Tensor]) -> Any:
        """Return cheap lists that show whether anything has changed; ``None`` if PyTorch cannot tell."""
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:
            # An inference tensor has no version.
            return None
        return id(session), _changes, list(map(id, tensors)), versions, [tensor.data_ptr() for tensor in tensors]


_changes = 0
"""Counts changes that tensors do not show: a tensor was freed, so its address may be reused; a copy was forgotten."""


def _notice(_: Any = None) -> None:
    global _changes
    _changes += 1


_weights: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()


def weight_of(tensor: torch.Tensor) -> Weight:
    """Return the `Weight` of a tensor, creating it if needed."""
    known = _weights.get(id(tensor))
    if known is None or not known.is_of(tensor):
        known = _weights[id(tensor)] = Weight(tensor)
    return known


def _version_of(tensor: torch.Tensor) -> int:
    return _UNCOUNTED if tensor.is_inference() else tensor._version


def _forget_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Upload tensors again that a fused optimizer has written: PyTorch does not count those writes."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                known = _weights.get(id(parameter))
                if known is not None:
                    known.forget()


register_optimizer_step_post_hook(_forget_fused)
