"""Zero tangents: PyTorch's "efficient zero tensors", for this device.

Forward-mode differentiation creates one where an operand has no tangent. Zero times anything is then zero, even for
infinity and NaN. Such a tensor has no memory, so no server runs its operators. The executor gets ordinary zeros, and
the arithmetic that PyTorch defines for such tensors is implemented here.

Source:
    aten/src/ATen/ZeroTensorFallback.cpp; ``add_zerotensor`` and its siblings in aten/src/ATen/native/BinaryOps.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from djinn.ir.schema import ReturnKind, facts_of
from djinn.kinds.interceptor import Handler
from djinn.record.tensor import LazyTensor
from djinn.session import runtime

if TYPE_CHECKING:
    from djinn.session.session import Session

aten = torch.ops.aten


class LazyZeros(LazyTensor):
    """A lazy tensor that is known to be zero. Its value at the executor is ordinary zeros."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub declares an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        facts, kwargs = facts_of(func), kwargs or {}
        named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
        if not facts.changes_metadata and any(isinstance(named.get(name), LazyZeros) for name in facts.written):
            raise RuntimeError("ZeroTensors are immutable. Please use the materialized zero tensor obtained using "
                               ".clone() if you want a mutable tensor.")
        # If another class takes part, it decides, and the rules would get no result.
        rule = _RULES.get(func) if all(issubclass(one, LazyTensor) for one in types) else None
        made = NotImplemented if rule is None else rule(*args, **kwargs)
        if made is not NotImplemented:
            return made
        is_view = bool(facts.aliases) and facts.aliases[0] is not None and ReturnKind.WRITTEN not in facts.returns
        if not is_view and not _has_own_kernel(func):
            args, kwargs = _materialized((args, kwargs))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(LazyTensor, _known, made) if is_view else made


def _known(zeros: LazyTensor) -> LazyTensor:
    """Mark a tensor as zero for PyTorch's arithmetic."""
    zeros.__class__ = LazyZeros
    return zeros


@cache
def _has_own_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether PyTorch has a kernel of an operator that does not materialize such tensors."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "ZeroTensor"))


def _materialized(arguments: Any) -> Any:
    """Replace zeros as PyTorch does: by one zero, expanded. Layouts of results may depend on that."""

    def expanded(zeros: LazyZeros) -> Any:
        spec = zeros._value.spec
        one = torch.zeros((), dtype=spec.dtype, device=spec.device)
        return runtime.current().dispatch(aten.expand.default, (one, list(spec.size)), {})

    return tree_map_only(LazyZeros, expanded, arguments)


def _result_of(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Record an operator on ordinary zeros, for its result's metadata. It does not run if the result is dropped."""
    args, kwargs = _materialized((args, kwargs))
    return runtime.current().dispatch(operator, args, kwargs)


def _zeros(like: torch.Tensor) -> LazyTensor:
    return efficient_zeros(runtime.current(), aten._efficientzerotensor.default, (list(like.shape),),
                           {"dtype": like.dtype, "device": like.device})


def _product(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _zeros(_result_of(operator, *args, **kwargs))


def _quotient(operator: Any) -> Callable[..., Any]:
    def divide(first: Any, second: Any, **kwargs: Any) -> Any:
        is_zero = not isinstance(second, LazyZeros)
        return _zeros(_result_of(operator, first, second, **kwargs)) if is_zero else NotImplemented

    return divide


def _sum(operator: Any, *, is_difference: bool = False) -> Callable[..., Any]:
    def add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return NotImplemented
        result = _result_of(operator, first, second, alpha=alpha)
        if isinstance(first, LazyZeros) and isinstance(second, LazyZeros):
            return _zeros(result)
        other = second if isinstance(first, LazyZeros) else first
        dispatch = runtime.current().dispatch
        wide = dispatch(aten.expand.default, (other, list(result.shape)), {})
        copied = dispatch(aten._to_copy.default, (wide,), {"dtype": result.dtype, "device": result.device})
        if other is first:
            return copied
        signed = dispatch(aten.neg.default, (copied,), {}) if is_difference else copied
        return signed if alpha == 1 else dispatch(aten.mul.Tensor, (signed, alpha), {})

    return add


_RULES: Mapping[Any, Callable[..., Any]] = {
    aten.mul.Tensor: _product(aten.mul.Tensor),
    aten.mul.Scalar: _product(aten.mul.Scalar),
    aten.linalg_cross.default: _product(aten.linalg_cross.default),
    aten.dot.default: _product(aten.dot.default),
    aten.vdot.default: _product(aten.vdot.default),
    aten.div.Tensor: _quotient(aten.div.Tensor),
    aten.add.Tensor: _sum(aten.add.Tensor),
    aten.sub.Tensor: _sum(aten.sub.Tensor, is_difference=True),
}
"""Operators with dedicated PyTorch kernels; ``NotImplemented`` where these kernels materialize after all."""


def efficient_zeros(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyTensor:
    """Create zeros that are marked as zero."""
    return _known(session.dispatch(aten.zeros.default, args, kwargs))


def zeros_laid_out_as(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Create zeros with the second tensor's layout, after the mapped dimensions of the first.

    Source:
        ``_new_zeros_with_same_feature_meta`` of aten/src/ATen/native/TensorFactories.cpp.
    """
    first, other = args[:2]
    mapped = first.shape[: kwargs.get("self_num_batch_dims", args[2] if len(args) > 2 else 0)]
    length = _reach(other)
    steps = [math.prod(mapped[index + 1:]) * length for index in range(len(mapped))]
    zeros = session.dispatch(aten.zeros.default, ([math.prod(mapped) * length],),
                             {"dtype": other.dtype, "device": other.device})
    return session.dispatch(aten.as_strided.default, (
        zeros, [*mapped, *other.shape], [*steps, *other.stride()], other.storage_offset()), {})


def has_same_extent(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return that a tangent's memory is as long as its tensor's: views are repeated, and need no memory around them."""
    return True


def clone_with_layout(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor with its layout, at once; PyTorch would delay the copy until one of the two is written."""
    tensor = args[0]
    whole = session.dispatch(aten.as_strided.default, (tensor, [_reach(tensor)], [1], 0), {})
    return session.dispatch(aten.as_strided.default, (
        session.dispatch(aten.clone.default, (whole,), {}), list(tensor.shape), list(tensor.stride()),
        tensor.storage_offset()), {})


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of elements from the start of a tensor's storage to its last one."""
    offset = int(tensor.storage_offset())
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return offset + last + 1 if tensor.numel() else offset


HANDLERS: Mapping[torch._ops.OpOverload, Handler] = {
    aten._efficientzerotensor.default: efficient_zeros,
    aten._new_zeros_with_same_feature_meta.default: zeros_laid_out_as,
    aten._has_same_storage_numel.default: has_same_extent,
    aten._lazy_clone.default: clone_with_layout,
}
