"""How an operation on sparse tensors is described to the executor: a text beside the tensors and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from djinn.errors import ProtocolError, UnsupportedTensorError
from djinn.wire.tensors import DTYPE_NAMES, dtype_named

__all__ = ("COMPONENTS", "LAYOUTS", "Form", "SparseCall", "SparseForm", "decoded", "sparse_forms")

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc, "bsr": torch.sparse_bsr,
           "bsc": torch.sparse_bsc}
COMPONENTS = {name: 2 if name == "coo" else 3 for name in LAYOUTS}
"""How many tensors a sparse tensor of a layout consists of."""
MAX_DIMENSIONS = 64
MAX_ITEMS = 256
_NAMES = {layout: name for name, layout in LAYOUTS.items()}


class DenseForm(msgspec.Struct, frozen=True, tag="d"):
    """The next tensor."""


class SparseForm(msgspec.Struct, frozen=True, tag="s"):
    """A sparse tensor, made of the next tensors.

    Attributes:
        layout: A key of `LAYOUTS`.
        size: Its size.
        is_coalesced: Whether its indices are known to be sorted and unique; of ``coo`` only.
    """

    layout: str
    size: tuple[int, ...]
    is_coalesced: bool = False


class NumberForm(msgspec.Struct, frozen=True, tag="n"):
    """The next number."""


class ConstantForm(msgspec.Struct, frozen=True, tag="c"):
    """An argument that is part of the text."""

    value: None | bool | int | str = None


class TorchForm(msgspec.Struct, frozen=True, tag="t"):
    """A dtype, a layout, or the executor's device."""

    kind: str
    name: str = ""


class ItemsForm(msgspec.Struct, frozen=True, tag="l"):
    """A list."""

    items: tuple[DenseForm | SparseForm | NumberForm | ConstantForm | TorchForm, ...]


Form = DenseForm | SparseForm | NumberForm | ConstantForm | TorchForm | ItemsForm


class SparseCall(msgspec.Struct, frozen=True):
    """An operation.

    Attributes:
        operator: The overload that eager would call.
        arguments: By position.
        keywords: By name.
    """

    operator: str
    arguments: tuple[Form, ...]
    keywords: dict[str, Form] = {}

    def encoded(self) -> str:
        """Return the text."""
        return msgspec.json.encode(self).decode()

    def filled(self, tensors: Iterator[Any], numbers: Iterator[Any], sparse: Any, device: Any) -> tuple[Any, Any]:
        """Return positional and keyword arguments.

        Args:
            tensors: The components and the dense tensors, in order.
            numbers: The numbers, in order.
            sparse: Makes a sparse tensor of its form and its components.
            device: Stands for the logical device.
        """
        def fill(form: Form) -> Any:
            if isinstance(form, DenseForm):
                return next(tensors)
            if isinstance(form, SparseForm):
                return sparse(form, [next(tensors) for _ in range(COMPONENTS[form.layout])])
            if isinstance(form, NumberForm):
                return next(numbers)
            if isinstance(form, ItemsForm):
                return [fill(item) for item in form.items]
            return form.value if isinstance(form, ConstantForm) else _constant(form, device)

        try:
            return [fill(form) for form in self.arguments], {name: fill(form) for name, form in self.keywords.items()}
        except StopIteration:
            raise ProtocolError(f"{self.operator} is given too few tensors or numbers.") from None


_decoder = msgspec.json.Decoder(SparseCall)


def decoded(text: str) -> SparseCall:
    """Read a text that came from a client.

    Raises:
        ProtocolError: It describes no call.
    """
    try:
        call = _decoder.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"This describes no operation on sparse tensors: {error}") from None
    for form in sparse_forms(call):
        if form.layout not in LAYOUTS or len(form.size) > MAX_DIMENSIONS:
            raise ProtocolError(f"A sparse tensor of layout {form.layout[:20]!r} with {len(form.size)} dimensions.")
    return call


def sparse_forms(call: SparseCall) -> list[SparseForm]:
    """List the sparse tensors of a call, in order."""
    flat = [item for form in (*call.arguments, *call.keywords.values())
            for item in (form.items if isinstance(form, ItemsForm) else (form,))]
    return [form for form in flat if isinstance(form, SparseForm)]


def constant_form(item: Any) -> Form:
    """Describe an argument that is neither tensor nor number.

    Raises:
        UnsupportedTensorError: It cannot be sent.
    """
    if item is None or isinstance(item, (bool, str)):
        return ConstantForm(item)
    if isinstance(item, torch.dtype) and item in DTYPE_NAMES:
        return TorchForm("dtype", DTYPE_NAMES[item])
    if isinstance(item, torch.layout):
        return TorchForm("layout", _NAMES.get(item, "strided"))
    if isinstance(item, torch.device):
        return TorchForm("device")
    if isinstance(item, torch.memory_format):
        return ConstantForm(None)
    raise UnsupportedTensorError(f"An argument of type {type(item).__name__} cannot be sent with a sparse tensor.")


def layout_name(layout: torch.layout) -> str:
    """Return the key of a sparse layout in `LAYOUTS`."""
    return _NAMES[layout]


def sequence_form(items: Sequence[Any]) -> bool:
    """Whether a list consists of integers only; it is part of the text then."""
    return all(type(item) is int for item in items)


def _constant(form: TorchForm, device: Any) -> Any:
    if form.kind == "device":
        return device
    if form.kind == "dtype":
        return dtype_named(form.name)
    if form.kind == "layout" and (form.name in LAYOUTS or form.name == "strided"):
        return LAYOUTS.get(form.name, torch.strided)
    raise ProtocolError(f"Unknown constant {form.kind[:20]} {form.name[:40]!r}.")
