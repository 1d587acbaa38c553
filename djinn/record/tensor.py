"""Lazy tensors: PyTorch tensors in every respect except that their data is remote."""

from __future__ import annotations

import sys
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from djinn import lazy_names
from djinn.ir.spec import TensorSpec
from djinn.ir.value import Value
from djinn.record import devices
from djinn.record.dispatcher import dispatcher, pending_errors, torch_dispatch

_make_wrapper = torch.Tensor._make_wrapper_subclass
_without_functions = torch._C.DisableTorchFunctionSubclass
_call_plainly = torch._C._disabled_torch_function_impl
"""Calls a function with `_without_functions` active, entirely in C."""
_NO_KEYWORDS: dict[str, Any] = {}
_DEFAULT = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]  # a class method


class MixedGradientError(RuntimeError):
    """A gradient was requested for an operation on lazy and ordinary tensors that autograd did not see as mixed."""


class HostGradientError(MixedGradientError):
    """The same, where the operation writes to an ordinary tensor."""


def _ask_others(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Let other libraries' subclasses handle a call as they would if ours were an ordinary tensor."""
    others = tuple(other for other in types if not issubclass(other, LazyTensor))
    asked = (other.__torch_function__(func, others, args, kwargs) for other in others
             if getattr(other.__torch_function__, "__func__", None) is not _DEFAULT)
    return next((done for done in asked if done is not NotImplemented), NotImplemented)


class LazyTensor(torch.Tensor):
    """A tensor on a remote accelerator.

    Operations on it are recorded. Its size, strides, dtype and device are known at once, without a request. Its data is
    fetched when a value is needed: ``item()``, ``cpu()``, ``numpy()``, ``tolist()``, ``print``, ``if``.
    """

    _value: Value
    __torch_dispatch__: Any = classmethod(torch_dispatch)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if len(types) > 1 and (done := _ask_others(func, types, args, kwargs or {})) is not NotImplemented:
                return done
            handler = dispatcher.functions.get(func)
            if handler is not None:
                return handler(func, args, kwargs or {})
            return _call_plainly(func, types, args, kwargs or _NO_KEYWORDS)
        except MixedGradientError as mixed:
            # The handler calls the function again, with all tensors on one side.
            return dispatcher.functions[type(mixed)](func, args, kwargs or _NO_KEYWORDS)
        except SystemError as hiding:
            # PyTorch issues a call's warnings while its exception propagates. This hides the exception or drops it,
            # because looking up a method clears it (`_PyType_Lookup`); a device guard may also have replaced it.
            hidden = hiding.__cause__ or pending_errors.get(get_ident())
            if hidden is None:
                raise
            raise hidden from hidden.__cause__
        finally:
            if pending_errors:
                pending_errors.pop(get_ident(), None)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a plain attribute there; this one skips __torch_function__
        """Extent of each dimension."""
        return self._value.spec.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # as above
        """Type of an element."""
        return self._value.spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # as above
        """Logical device."""
        return self._value.spec.device

    @property
    def ndim(self) -> int:  # type: ignore[override]  # as above
        """Number of dimensions."""
        return len(self._value.spec.size)

    def size(self, dim: int | None = None) -> Any:
        """Return the size, or the extent of one dimension."""
        if dim is None or type(dim) is int:
            return self._value.spec.size if dim is None else self._value.spec.size[dim]
        with _without_functions():
            return torch.Tensor.size(self, dim)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._value.spec.size)

    @property
    def data(self) -> torch.Tensor:
        """The same values outside autograd; writes to them are not counted. Assigning replaces everything."""
        with _without_functions(), torch._C._AutoDispatchBelowADInplaceOrView():
            return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if isinstance(new, LazyTensor):
            value = new.detach()._value  # type: ignore[attr-defined]  # a lazy tensor's detach is lazy
            reshape_wrapper(self, value.spec, new)
            self._value = value
        else:
            dispatcher.functions[torch.Tensor.data.__set__](torch.Tensor.data.__set__, (self, new), _NO_KEYWORDS)  # type: ignore[attr-defined]  # a descriptor implemented in C

    def materialize(self) -> torch.Tensor:
        """Bring the data home as an ordinary CPU tensor outside autograd. Waits."""
        made: torch.Tensor = devices.current_session().materialize([self])[0]
        return made

    def tolist(self) -> Any:
        """Return the data as nested lists."""
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the data as a new numpy array.

        Raises:
            RuntimeError: The tensor requires a gradient and ``force`` is not set, as for any tensor.
        """
        with _without_functions():
            needs_gradient = self.requires_grad
        if needs_gradient and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.materialize().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = self.numpy()
        return made if dtype is None else made.astype(dtype, copy=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        local = self.materialize()
        with _without_functions():
            suffixes = [f"device='{self.device}'"]
            if self.grad_fn is not None:
                suffixes.append(f"grad_fn=<{self.grad_fn.name().rpartition('::')[2]}>")
            elif self.requires_grad:
                suffixes.append("requires_grad=True")
            is_parameter = getattr(self, "_is_param", False)
        text = torch._tensor_str._str(local)
        body = f"{text[:-1]}, {', '.join(suffixes)})"
        return f"Parameter containing:\n{body}" if is_parameter else body

    def _repr_html_(self) -> str:
        made: str = lazy_names.load("tensor_html")(self._value.spec, self._whereabouts())
        return made

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # A notebook would ask for the text too, and that for the data.
        text = lazy_names.load("tensor_text")(self._value.spec, self._whereabouts())
        return {"text/plain": text, "text/html": self._repr_html_()}

    def _whereabouts(self) -> str:
        """Say where the value is. Sends nothing, starts nothing."""
        session = devices.running_session()
        if session is None or self._value.released is not session.recorder.released:
            return "of a session that has ended"
        operation = session.producer_of(self)
        return f"pending {operation}" if operation else f"held by {session.backend.address}"

    def __format__(self, format_spec: str) -> str:
        if not self.shape and not getattr(self, "_is_param", False):
            return format(self.materialize().item(), format_spec)
        return object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # PyTorch's own way would save no data: without a handler, this fails.
        reduce = torch.Tensor.__reduce_ex__
        return dispatcher.functions[reduce](reduce, (self, protocol), _NO_KEYWORDS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        deepcopy = torch.Tensor.__deepcopy__
        return dispatcher.functions[deepcopy](deepcopy, (self, memo), _NO_KEYWORDS)

    def data_ptr(self) -> int:
        """Return a number that is unique like an address; it exceeds 64 bits, so it cannot be dereferenced."""
        spec = self._value.spec
        address = (self._value.slot.storage << 64) + spec.storage_offset * spec.dtype.itemsize
        return 0 if 0 in spec.size else address

    @property
    def operation(self) -> str:
        """The pending operation that gives this tensor, or ``""`` if nothing is pending."""
        return str(devices.current_session().producer_of(self))


def wrap(spec: TensorSpec, value: Value) -> LazyTensor:
    """Create the lazy tensor that holds ``value``."""
    made: LazyTensor = _make_wrapper(LazyTensor, spec.size, **spec.layout)
    made._value = value
    return made


def reshape_wrapper(tensor: LazyTensor, spec: TensorSpec, like: torch.Tensor) -> None:
    """Give a lazy tensor other metadata, for PyTorch's own bookkeeping as well as for djinn's.

    It becomes an inference tensor, or an ordinary one, as ``like`` is.
    """
    with _without_functions(), torch._C._InferenceMode(like.is_inference()):
        bare = _make_wrapper(LazyTensor, spec.size, **spec.layout)
    with _without_functions():
        torch.Tensor.data.__set__(tensor, bare)  # type: ignore[attr-defined]  # a descriptor implemented in C
    tensor._value.spec = spec


def user_frame() -> FrameType:
    """Find the innermost frame of Python that belongs neither to PyTorch nor to djinn; without any, the caller's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "djinn")):
        frame = frame.f_back
    return frame or sys._getframe(1)


def user_line() -> str:
    """Describe the line of Python that `user_frame` finds."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
