"""Operations that combine lazy and ordinary tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from djinn.errors import UnsupportedTensorError
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import tensors_in
from djinn.kinds.interop import HostInterop
from djinn.record.tensor import HostGradientError, LazyTensor, MixedGradientError
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.operators.generators import remote_generator
from djinn_plugins.common.operators.random_states import checked_state
from djinn_plugins.device.interop.settings import InteropSettings
from djinn_plugins.device.sparse import recording as sparse

if TYPE_CHECKING:
    from djinn.session.session import Session


_SMALLEST_PART = 4
"""Views of at least this fraction of a parameter are views of its upload, which is then sent once for all of them."""


_LARGEST_STATISTICS_BYTES = 1 << 16
"""Tensors up to this size are compared before their upload is used again: PyTorch's batch norms do not count what they
write to their statistics.
"""


class _Upload(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    version: int
    made: LazyTensor
    content: torch.Tensor | None

    def is_current(self, tensor: torch.Tensor, version: int) -> bool:
        """Whether a tensor was not written since."""
        return self.version == version and (self.content is None or torch.equal(self.content, tensor))


class UploadingInterop(HostInterop):
    """Uploads ordinary tensors that are combined with lazy ones, and runs operations that write them locally."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._is_strict = session.plugins.settings(InteropSettings).strict
        self._uploaded: dict[int, _Upload] = {}

    def carry_out(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operation whose arguments are not all lazy.

        Raises:
            RuntimeError: Strict mode is on and eager PyTorch refuses the combination.
        """
        everything = tensors_in((args, tuple(kwargs.values())))
        if any(not isinstance(t, LazyTensor) and type(t) not in (torch.Tensor, torch.nn.Parameter) for t in everything):
            return NotImplemented
        if any(tensor.device.type == "meta" for tensor in everything):
            raise RuntimeError(f"Tensor on device meta is not on the expected device {self._session.device}!")
        generator = _generator((args, tuple(kwargs.values())))
        if generator is not None and not self._leaves_device(args, kwargs):
            return self._draw(generator, operator, args, kwargs)
        if self._leaves_device(args, kwargs):
            return self.at_home(operator, args, kwargs)
        ordinary = [tensor for tensor in everything if not isinstance(tensor, LazyTensor)]
        if not ordinary:
            raise UnsupportedTensorError(f"{operator} cannot be recorded with these arguments.")
        writes_home = any(not isinstance(tensor, LazyTensor) for tensor in _written(operator, args, kwargs))
        message = (f"Expected all tensors to be on the same device, but found at least two devices, "
                   f"{self._session.device} and cpu!")
        if self._is_strict and (writes_home or any(t.dim() for t in _not_indices(operator, args, kwargs))):
            raise RuntimeError(message)
        # An operation that also makes new results runs where its operands are, as a batch norm that updates statistics
        # which stayed here.
        runs_home = writes_home and all(kind is ReturnKind.WRITTEN for kind in facts_of(operator).returns)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (everything if runs_home else ordinary)):
            raise (HostGradientError if runs_home else MixedGradientError)(message)
        if any(tensor.layout is not torch.strided for tensor in everything):
            return sparse.run(operator, args, kwargs)
        if runs_home:
            return self.at_home(operator, args, kwargs)
        lifted = {id(tensor): self.upload(tensor) for tensor in ordinary}
        result = self._session.dispatch(operator, _mapped(args, lifted),
                                        {name: _mapped(item, lifted) for name, item in kwargs.items()})
        if writes_home:
            self._follow([t for t in _written(operator, args, kwargs) if id(t) in lifted], lifted)
        return result

    def _follow(self, written: list[torch.Tensor], lifted: dict[int, LazyTensor]) -> None:
        """Fetch what an operation has written to the uploads of ordinary tensors."""
        made = self._session.materialize([lifted[id(tensor)] for tensor in written])
        for tensor, local in zip(written, made, strict=True):
            known = self._uploaded.get(id(tensor))
            tensor.copy_(local)
            if known is not None and known.content is not None:
                known.content.copy_(local)

    def trigger(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that returns Python values on the executor, unless another class does."""
        if any(_contains_others(tensor) for tensor in tensors_in((args, tuple(kwargs.values())))):
            return NotImplemented
        return self._session.trigger(operator, *self._lifted(args, kwargs))

    def at_home(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fetch every lazy argument and run the operation locally; its writes to lazy arguments are sent back."""
        lazy = [tensor for tensor in tensors_in((args, tuple(kwargs.values()))) if isinstance(tensor, LazyTensor)]
        local = dict(zip(map(id, lazy), self._session.materialize(lazy), strict=True))
        result = operator(*_mapped(args, local), **{name: _mapped(item, local) for name, item in kwargs.items()})
        for tensor in _written(operator, args, kwargs):
            if isinstance(tensor, LazyTensor):
                tensor.copy_(local[id(tensor)])
            else:
                # Below autograd, not every operator increments the version counter when it writes.
                self.forget(tensor)
        return result

    def upload(self, tensor: torch.Tensor) -> Any:
        """Upload an ordinary tensor, once per version."""
        key = id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._uploaded.get(key)
        if known is not None and known.tensor() is tensor and version >= 0 and known.is_current(tensor, version):
            return known.made
        made: Any = self._viewed(tensor)
        if made is not None:
            return made
        made = self._session.upload(tensor) if tensor.layout is torch.strided else sparse.uploaded(tensor)
        if version >= 0:
            uploaded = self._uploaded
            is_counted = isinstance(tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or (
                tensor.nbytes > _LARGEST_STATISTICS_BYTES)
            content = None if is_counted else tensor.detach().clone()
            there = weakref.ref(tensor, lambda _: uploaded.pop(key, None))
            self._uploaded[key] = _Upload(there, version, made, content)
        return made

    def uploaded(self, tensor: torch.Tensor) -> LazyTensor | None:
        """Return the upload of an ordinary tensor, if it was uploaded. Uploads nothing."""
        known = self._uploaded.get(id(tensor))
        return known.made if known is not None and known.tensor() is tensor else None

    def _viewed(self, tensor: torch.Tensor) -> Any:
        """Return a view of a parameter as a view of the parameter's upload; ``None`` for any other tensor."""
        base = tensor._base
        if not isinstance(base, torch.nn.Parameter) or base.layout is not torch.strided or (
            tensor.dtype != base.dtype or tensor.is_conj() or tensor.is_neg() or not base.is_contiguous()
            or _SMALLEST_PART * tensor.numel() < base.numel()):
            return None
        offset = int(tensor.storage_offset() - base.storage_offset())
        with torch._C._AutoDispatchBelowAutograd():
            return self._session.dispatch(torch.ops.aten.as_strided.default,
                                          (self.upload(base), list(tensor.shape), list(tensor.stride()), offset), {})

    def _draw(self, generator: torch.Generator, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw from a generator of this process: its state is sent before the operation, and fetched after it."""
        session = self._session
        without = {id(generator): None}
        remote = remote_generator(generator)
        if remote is not None:
            return remote.draw(session, lambda: session.dispatch(
                operator, _mapped(args, without), {name: _mapped(item, without) for name, item in kwargs.items()}))
        kind = device_of(session.backend.welcome).kind
        if generator.device.type != kind:
            raise RuntimeError(f"Expected a {kind!r} device type for generator but found {generator.device.type!r}")
        with session.lock:
            own = session.random_state()
            session.set_random_state(generator.get_state())
            try:
                made = session.dispatch(operator, _mapped(args, without),
                                        {name: _mapped(item, without) for name, item in kwargs.items()})
                generator.set_state(checked_state(kind, session.random_state()))
            finally:
                session.set_random_state(own)
        return made

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the cached upload of an ordinary tensor, and the weak reference to it."""
        self._uploaded.pop(id(tensor), None)

    def _lifted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = [tensor for tensor in tensors_in((args, tuple(kwargs.values()))) if not isinstance(tensor, LazyTensor)]
        lifted = {id(tensor): self.upload(tensor) for tensor in found}
        return _mapped(args, lifted), {name: _mapped(item, lifted) for name, item in kwargs.items()}

    def _leaves_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        logical = self._session.device.type
        return any(isinstance(item, torch.device) and item.type != logical for item in (*args, *kwargs.values()))


def _contains_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class carries out operators on tensors that it contains, and has no memory itself."""
    return (not isinstance(tensor, LazyTensor)
            and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def _generator(items: Any) -> torch.Generator | None:
    return next((item for group in items for item in group if isinstance(item, torch.Generator)), None)


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    facts = facts_of(operator)
    named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
    return tensors_in([named[name] for name in facts.written if name in named])


def _not_indices(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """List the ordinary tensors of a call that eager PyTorch requires on the device; indices may be on any device."""
    items = [item for argument, item in zip(operator._schema.arguments, args, strict=False)
             if not str(argument.type).startswith("List[Optional[Tensor")]
    return [tensor for tensor in tensors_in((items, tuple(kwargs.values()))) if not isinstance(tensor, LazyTensor)]


def _mapped(item: Any, replacements: dict[int, Any]) -> Any:
    if isinstance(item, (torch.Tensor, torch.Generator)):
        return replacements.get(id(item), item)
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(member, replacements) for member in item)
    return item
