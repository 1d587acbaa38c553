"""Assertions with a common message format: ``what: got ..., should be ... [where]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from djinn.kinds import OutputSpec
from djinn_plugins.common.memory.tensor_bytes import buffer_of

__all__ = ("Tolerance", "describe", "expect", "expect_equal", "expect_raises", "expect_same_metadata",
           "expect_same_spec", "expect_same_tensor", "expect_same_value", "same_value", "steps", "violated")

Error = TypeVar("Error", bound=BaseException)
Tolerance = Mapping[torch.dtype, tuple[float, float]]
"""Relative and absolute tolerance by dtype; where a dtype is missing, values must be equal."""

_SHOWN_ELEMENTS = 64


def describe(value: Any) -> str:
    """Describe a value in one line."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if value.device.type == "meta" or value.numel() > _SHOWN_ELEMENTS:
        return shape
    try:
        return f"{shape} {value.detach().cpu().tolist()}"
    except RuntimeError:  # bits are no numbers; PyTorch raises this class or one that is derived from it
        return f"{shape} {bytes_of(value.cpu()).hex()}"


def violated(what: str, *, got: str, wanted: str, where: str) -> NoReturn:
    """Raise the error for a broken law."""
    __tracebackhide__ = True
    raise AssertionError(f"{what}: got {got}, should be {wanted} [{where}]")


def expect(holds: bool, what: str, *, got: Any, wanted: str, where: str) -> None:
    """Check a condition."""
    __tracebackhide__ = True
    if not holds:
        violated(what, got=describe(got), wanted=wanted, where=where)


def expect_equal(got: Any, wanted: Any, what: str, where: str) -> None:
    """Check two plain values for equality."""
    __tracebackhide__ = True
    if got != wanted:
        violated(what, got=describe(got), wanted=describe(wanted), where=where)


def expect_same_metadata(got: torch.Tensor, wanted: torch.Tensor, what: str, where: str) -> None:
    """Check dtype, size, stride and storage offset. Strides of tensors without elements are meaningless."""
    __tracebackhide__ = True
    expect_equal(got.dtype, wanted.dtype, f"dtype of {what}", where)
    expect_equal(tuple(got.size()), tuple(wanted.size()), f"size of {what}", where)
    if wanted.numel():
        expect_equal(got.stride(), wanted.stride(), f"stride of {what}", where)
        expect_equal(got.storage_offset(), wanted.storage_offset(), f"storage offset of {what}", where)


def expect_same_spec(got: OutputSpec, wanted: OutputSpec, what: str, where: str) -> None:
    """Check metadata. Strides of dimensions without a second element are meaningless."""
    __tracebackhide__ = True
    expect_equal(got.dtype, wanted.dtype, f"dtype of {what}", where)
    expect_equal(tuple(got.size), tuple(wanted.size), f"size of {what}", where)
    if wanted.size.numel():
        expect_equal(steps(got.size, got.stride), steps(wanted.size, wanted.stride), f"stride of {what}", where)
        expect_equal(got.storage_offset, wanted.storage_offset, f"storage offset of {what}", where)


def steps(size: Sequence[int], stride: Sequence[int]) -> tuple[int | None, ...]:
    """Return strides, ``None`` for dimensions without a second element."""
    return tuple(step if extent > 1 else None for step, extent in zip(stride, size, strict=True))


def expect_same_tensor(
    got: torch.Tensor, wanted: torch.Tensor, what: str, where: str, tolerance: Tolerance | None = None
) -> None:
    """Check dtype, size and elements of two CPU tensors; NaN equals NaN."""
    __tracebackhide__ = True
    expect_equal(got.dtype, wanted.dtype, f"dtype of {what}", where)
    expect_equal(tuple(got.size()), tuple(wanted.size()), f"size of {what}", where)
    relative, absolute = (tolerance or {}).get(wanted.dtype, (0.0, 0.0))
    if not same_elements(got, wanted, relative, absolute):
        violated(f"elements of {what}", got=describe(got), wanted=describe(wanted), where=where)


def same_elements(got: torch.Tensor, wanted: torch.Tensor, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """Compare elements; NaN equals NaN."""
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        if relative or absolute:
            return torch.allclose(got, wanted, relative, absolute, equal_nan=True)
        return same_bits(got, wanted) or torch.allclose(got, wanted, 0.0, 0.0, equal_nan=True)
    return torch.equal(got, wanted)


_WHOLE = {1: torch.uint8, 2: torch.int16}
"""Dtypes with kernels that copy; some small ones, such as ``int4``, have none."""


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare elements bit by bit, regardless of strides."""
    return bytes_of(got) == bytes_of(wanted)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a CPU tensor as bytes, in row-major order."""
    if tensor._is_zerotensor():
        return bytes(tensor.numel() * tensor.element_size())
    flat = tensor.detach().resolve_conj().resolve_neg()
    if (whole := _WHOLE.get(flat.itemsize)) is not None:
        flat = flat.view(whole)
    flat = flat.contiguous().flatten()
    return bytes(buffer_of(flat))


def expect_same_value(got: Any, wanted: Any, what: str, where: str) -> None:
    """Check a plain result: its type and value; NaN equals NaN."""
    __tracebackhide__ = True
    expect_equal(type(got).__name__, type(wanted).__name__, f"type of {what}", where)
    if not same_value(got, wanted):
        violated(what, got=describe(got), wanted=describe(wanted), where=where)


def same_value(got: Any, wanted: Any) -> bool:
    """Compare plain values; NaN equals NaN, and complex numbers are compared by their parts."""
    if isinstance(got, complex) and isinstance(wanted, complex):
        return same_value(got.real, wanted.real) and same_value(got.imag, wanted.imag)
    return bool(got == wanted) or (
        isinstance(got, float) and isinstance(wanted, float) and math.isnan(got) and math.isnan(wanted))


def expect_raises(kind: type[Error], action: Callable[[], Any], what: str, where: str, *, naming: str = "") -> Error:
    """Check that an action raises, and that the message contains the expected name."""
    __tracebackhide__ = True
    try:
        returned = action()
    except kind as error:
        if naming not in str(error):
            violated(f"message of {kind.__name__} for {what}", got=repr(str(error)), wanted=f"text with {naming!r}",
                     where=where)
        return error
    except Exception as error:
        raise AssertionError(
            f"{what}: got {type(error).__name__}: {error}, should be {kind.__name__} [{where}]") from error
    violated(what, got=f"no exception but {describe(returned)}", wanted=kind.__name__, where=where)
