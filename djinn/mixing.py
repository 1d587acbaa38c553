"""Operations in which lazy and ordinary tensors meet."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from djinn.errors import UnsupportedTensorError
from djinn.model.schema import facts_of
from djinn.model.spec import tensors_in
from djinn.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session import Session


class Mixer:
    """Uploads ordinary tensors that meet lazy ones, and runs at home what writes into ordinary tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._uploaded: dict[int, tuple[weakref.ref[torch.Tensor], int, LazyTensor]] = {}

    def carry_out(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation in which not everything is lazy.

        Raises:
            RuntimeError: Strict mode is on and the mixture is one that eager PyTorch refuses.
        """
        everything = tensors_in((args, tuple(kwargs.values())))
        if any(not isinstance(t, LazyTensor) and type(t) not in (torch.Tensor, torch.nn.Parameter) for t in everything):
            return NotImplemented
        if _generators((args, tuple(kwargs.values()))):
            raise UnsupportedTensorError("A generator of this process cannot draw on a remote accelerator.",
                                         hint="Leave it out and seed with torch.manual_seed instead.")
        if self._leaves_device(args, kwargs) or self._writes_home(operator, args, kwargs):
            return self.at_home(operator, args, kwargs)
        if not any(not isinstance(t, LazyTensor) for t in everything):
            raise UnsupportedTensorError(f"{operator} cannot be recorded with these arguments.")
        if self._session.config.strict:
            self._refuse(everything)
        return self._session.dispatch(operator, *self._lifted(args, kwargs))

    def trigger(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that gives Python values on the executor."""
        return self._session.trigger(operator, *self._lifted(args, kwargs))

    def at_home(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bring every lazy argument home and run the operation here; its writes into lazy arguments are sent back."""
        lazy = [tensor for tensor in tensors_in((args, tuple(kwargs.values()))) if isinstance(tensor, LazyTensor)]
        local = dict(zip(map(id, lazy), self._session.materialize(lazy), strict=True))
        result = operator(*_mapped(args, local), **{name: _mapped(item, local) for name, item in kwargs.items()})
        for tensor in _written(operator, args, kwargs):
            if isinstance(tensor, LazyTensor):
                tensor.copy_(local[id(tensor)])
        return result

    def upload(self, tensor: torch.Tensor) -> LazyTensor:
        """Upload an ordinary tensor, once per version."""
        key = id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._uploaded.get(key)
        if known is not None and known[0]() is tensor and known[1] == version and version >= 0:
            return known[2]
        made = self._session.upload(tensor)
        if version >= 0:
            uploaded = self._uploaded
            self._uploaded[key] = (weakref.ref(tensor, lambda _: uploaded.pop(key, None)), version, made)
        return made

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop what is cached for an ordinary tensor, and with it the weak reference to it."""
        self._uploaded.pop(id(tensor), None)

    def _lifted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = [tensor for tensor in tensors_in((args, tuple(kwargs.values()))) if not isinstance(tensor, LazyTensor)]
        lifted = {id(tensor): self.upload(tensor) for tensor in found}
        return _mapped(args, lifted), {name: _mapped(item, lifted) for name, item in kwargs.items()}

    def _leaves_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        logical = self._session.device.type
        return any(isinstance(item, torch.device) and item.type != logical for item in (*args, *kwargs.values()))

    @staticmethod
    def _writes_home(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(not isinstance(tensor, LazyTensor) for tensor in _written(operator, args, kwargs))

    def _refuse(self, tensors: list[torch.Tensor]) -> None:
        if any(not isinstance(tensor, LazyTensor) and tensor.dim() for tensor in tensors):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                               f"{self._session.device} and cpu!")


def _generators(items: Any) -> list[torch.Generator]:
    return [item for group in items for item in group if isinstance(item, torch.Generator)]


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    facts = facts_of(operator)
    named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
    return tensors_in([named[name] for name in facts.written if name in named])


def _mapped(item: Any, replacements: dict[int, Any]) -> Any:
    if isinstance(item, torch.Tensor):
        return replacements.get(id(item), item)
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(member, replacements) for member in item)
    return item
