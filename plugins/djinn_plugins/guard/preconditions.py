"""Building blocks of checks: conditions on sizes, and on values that a kernel does not check itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch

from djinn.errors import ProgramTooLargeError
from djinn_plugins.common.operators.operators import operator_named

Named: TypeAlias = Mapping[str, Any]
"""Arguments of a call by name, defaults included."""


def expect(holds: bool, what: str) -> None:
    """Reject a call with the error that its kernel should have raised.

    Raises:
        RuntimeError: The condition does not hold.
    """
    if not holds:
        raise RuntimeError(what)


class KernelError(RuntimeError):
    """The error that a kernel raises, in its own words; nothing is added to its text."""


def expect_as_eager(holds: bool, words: str) -> None:
    """Reject a call with the error that eager PyTorch raises, word for word.

    Raises:
        KernelError: The condition does not hold.
    """
    if not holds:
        raise KernelError(words)


def same_size(named: Named, *names: str) -> None:
    """Check that tensors have the same size."""
    first = named[names[0]]
    for name in names[1:]:
        size_is(named, name, first.shape)


def size_is(named: Named, name: str, size: Sequence[int]) -> None:
    """Check the size of a tensor, if it is given."""
    tensor = named[name]
    if tensor is not None:
        expect(tuple(tensor.shape) == tuple(size), f"{name} has the size {list(tensor.shape)}, not {list(size)}")


def numel_is(named: Named, name: str, count: int, *, or_empty: bool = False) -> None:
    """Check the number of elements of a tensor, if it is given."""
    tensor = named.get(name)
    if tensor is not None and not (or_empty and not tensor.numel()):
        expect(tensor.numel() == count, f"{name} has {tensor.numel()} elements, not {count}")


def has_elements(*tensors: torch.Tensor) -> bool:
    """Whether elements can be read: the placeholders of memory estimates have none."""
    return not any(tensor.is_meta for tensor in tensors)


def within(named: Named, name: str, low: int, high: int, *, also: int | None = None) -> None:
    """Check that every element of an integer tensor is in ``low <= element < high``, or equal to ``also``."""
    tensor = named.get(name)
    if tensor is None or not tensor.numel() or not has_elements(tensor):
        return
    least, most = (int(bound) for bound in torch.aminmax(tensor))
    if low <= least and most < high:
        return
    outside = (tensor < low) | (tensor >= high)
    if also is not None:
        outside &= tensor != also
    expect(not bool(outside.any()), f"{name} has elements from {least} to {most}; {low} to {high - 1} are allowed")


def rows_exist(indices: torch.Tensor, rows: int) -> None:
    """Check that each index of an embedding bag is that of a row."""
    if not has_elements(indices):
        return
    outside = indices[(indices < 0) | (indices >= rows)]
    expect_as_eager(not outside.numel(), "embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be "
                                         f"{int(outside[0]) if outside.numel() else 0}")


def dims_exist(named: Named, name: str) -> None:
    """Check that a list of dimensions contains valid ones, each once."""
    rank = named["self"].dim()
    dims = named[name]
    expect(all(-rank <= dim < rank for dim in dims), f"{name} {dims} of a tensor of {rank} dimensions")
    expect(len({dim % rank for dim in dims}) == len(dims), f"{name} {dims} has a dimension twice")


def like_forward(named: Named, operator: str, source: str, tensors: Sequence[str], words: str) -> None:
    """Check that tensors have the size of an operator's result for ``source``, according to its meta kernel.

    Args:
        named: Arguments.
        operator: The operator.
        source: Names of its tensor arguments, in order.
        tensors: The arguments of the call that must have that size.
        words: Names of its other arguments, in order.
    """
    given = tuple(_frozen(named[name]) for name in words.split())
    sizes = tuple((tuple(named[name].shape), named[name].dtype) for name in source.split())
    wanted = _forward_size(operator, sizes, given)
    for name in tensors:
        size_is(named, name, wanted)


@lru_cache(maxsize=4096)
def _forward_size(operator: str, tensors: tuple[Any, ...], words: tuple[Any, ...]) -> tuple[int, ...]:
    # Kernels for reduced precision or for integers may be missing; the sizes are the same for all dtypes.
    with torch.inference_mode(mode=False), torch.no_grad():
        sources = [torch.empty(size, dtype=torch.float32, device="meta") for size, _ in tensors]
        made = operator_named(operator)(*sources, *words)
    first = made if isinstance(made, torch.Tensor) else made[0]
    return tuple(first.shape)


def _frozen(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


def extent_bytes(size: Sequence[int], stride: Sequence[int], offset: int, itemsize: int) -> int:
    """Return the distance in bytes from the start of a storage to a tensor's end, computed without overflow.

    A tensor without elements has no extent, independently of its offset.

    Raises:
        KernelError: A size, stride or offset is negative, or there is not one stride for each size.
    """
    # aten/src/ATen/native/TensorShape.cpp, as_strided.
    expect_as_eager(len(size) == len(stride), "mismatch in length of strides and shape")
    expect_as_eager(min(stride, default=0) >= 0,
                    f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}")
    expect_as_eager(offset >= 0, f"Tensor: invalid storage offset {offset}")
    expect_as_eager(min(size, default=0) >= 0,
                    f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")
    if not prod(size):
        return 0
    return (offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) + 1) * itemsize


def in_order(named: Named, name: str, low: int, high: int) -> None:
    """Check that integers do not decrease, and that all are in ``low <= element <= high``."""
    tensor = named[name]
    expect(tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions, not 1")
    within(named, name, low, high + 1)
    if tensor.numel() > 1 and has_elements(tensor):
        expect(bool((tensor[1:] >= tensor[:-1]).all()), f"{name} falls")


def too_large(what: str, size_bytes: int, held_bytes: int, limit_bytes: int) -> ProgramTooLargeError:
    """Return the error for a call that would need too much memory."""
    beside = f" beside the {held_bytes} that the program holds then" if held_bytes else ""
    return ProgramTooLargeError(f"{what} would take {size_bytes} bytes{beside}; {limit_bytes} are allowed.",
                                hint="Work in smaller pieces, or raise the server's --program-mib.")
