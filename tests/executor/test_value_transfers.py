"""Transfers: a value of any strides arrives as it was, and no transfer that lies is laid out."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from djinn.errors import ProtocolError, UnsupportedTensorError
from djinn.wire.messages import Failure, Layout, Plain, TensorHeader, ValueTransfer, decode, encode
from djinn.wire.tensors import DTYPES, is_dense
from djinn_plugins.common.memory.tensor_bytes import buffer_of, empty_from
from djinn_plugins.common.wire.frames import MAX_BODY_BYTES, body_length, tensor_headers
from djinn_plugins.executor import transfers
from djinn_plugins.executor.cpu.executor import CpuExecutor

EXECUTOR = CpuExecutor()


@attrs.frozen
class Form:
    """Where a tensor lies in the memory of another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@st.composite
def forms(draw: st.DrawFn) -> Form:
    size = draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [draw(st.sampled_from([0, 1, 1, 2, 3, 4, 7, 20, 64])) for _ in size]
    return Form(tuple(size), tuple(stride), draw(st.integers(0, 3)))


def made(form: Form, dtype: torch.dtype, *, inference: bool = False) -> torch.Tensor:
    length = form.offset + 1 + sum((n - 1) * step for n, step in zip(form.size, form.stride, strict=True) if n)
    with torch.inference_mode(inference):
        memory = (torch.arange(length * dtype.itemsize) * 37 % 251).to(torch.uint8)
        if dtype is torch.bool:
            memory %= 2
        return memory.view(dtype).as_strided(form.size, form.stride, form.offset)


def elements(tensor: torch.Tensor) -> bytes:
    """Copy the elements by bytes, which works for every dtype, in order."""
    if not tensor.numel():
        return b""
    with torch.inference_mode(tensor.is_inference()):
        last = tensor.dtype.itemsize
        flat = torch.empty(0, dtype=torch.uint8).set_(  # type: ignore[call-overload]  # the stub lacks this form
            tensor.untyped_storage(), tensor.storage_offset() * last, (*tensor.size(), last),
            (*(step * last for step in tensor.stride()), 1))
        return bytes(flat.flatten().tolist())


def travelled(value: torch.Tensor) -> tuple[torch.Tensor, ValueTransfer, list[torch.Tensor]]:
    """Send a value through everything that a server does with it, sockets left out."""
    transfer, tensors = transfers.pack(7, value, EXECUTOR.lend)
    got = decode(encode(transfer))
    assert got == transfer
    assert isinstance(got, ValueTransfer)
    transfers.check(got)
    [header] = tensor_headers(got)
    arrived = empty_from(header)
    data = bytes(buffer_of(tensors[0]))
    assert len(data) <= body_length([header])
    if data:
        buffer_of(arrived)[:] = data
    return transfers.unpack(got, arrived, EXECUTOR.adopt), transfer, tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(deadline=None, max_examples=400)
@given(forms(), st.sampled_from(sorted(DTYPES)), st.booleans())
@example(Form((3, 4), (4, 1), 0), "float32", False)
@example(Form((3, 4), (1, 3), 2), "int8", False)
@example(Form((3, 0), (5, 9), 0), "float32", False)
@example(Form((5,), (64,), 0), "bfloat16", True)
@example(Form((5,), (64,), 0), "complex32", False)
@example(Form((2, 5), (0, 64), 3), "complex128", False)
@example(Form((3, 3), (1, 1), 0), "float8_e5m2", True)
@example(Form((5, 1), (0, 64), 1), "bool", False)
def test_any_strided_tensor_arrives_as_it_was(form: Form, name: str, inference: bool) -> None:
    value = made(form, DTYPES[name], inference=inference)
    got, transfer, tensors = travelled(value)
    assert (got.dtype, got.size(), got.stride()) == (value.dtype, value.size(), value.stride())
    assert elements(got) == elements(value)
    distinct = math.prod(1 if step == 0 else n for n, step in zip(form.size, form.stride, strict=True))
    assert tensors[0].numel() <= 2 * distinct
    assert (transfer.layout is None) == is_dense(form.size, form.stride)


def test_what_is_expanded_travels_once() -> None:
    _, transfer, tensors = travelled(torch.arange(3.0).expand(10**6, 3))
    assert tensors[0].numel() == 3
    assert transfer.layout == Layout((10**6, 3), (0, 1))


def test_a_column_of_a_large_matrix_travels_alone() -> None:
    value = torch.arange(10**6).view(1000, 1000)[:, 7]
    got, _, tensors = travelled(value)
    assert tensors[0].numel() == 1000
    assert torch.equal(got, value)
    assert got.stride() == (1000,)


def test_views_of_conjugates_arrive_as_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j, 5j, 7])[::2].conj()
    got, _, _ = travelled(value)
    assert not got.is_conj()
    assert torch.equal(got, value.resolve_conj())


@pytest.mark.parametrize("value", [None, True, 5, -2.5, 1 + 2j, [1, [2.5, None]]])
def test_what_is_no_tensor_travels_too(value: Any) -> None:
    transfer, tensors = transfers.pack(1, value, EXECUTOR.lend)
    assert isinstance(transfer.item, Plain)
    assert tensors == []
    transfers.check(transfer)


def test_a_tensor_that_does_not_travel() -> None:
    with pytest.raises(UnsupportedTensorError):
        transfers.pack(1, torch.eye(3).to_sparse(), EXECUTOR.lend)


GOOD = ValueTransfer(1, TensorHeader("float32", (12,), (1,)), Layout((4, 7, 3), (3, 0, 1)))
FLAT = GOOD.item
LIES = {
    "nothing": ValueTransfer(1),
    "both": ValueTransfer(1, Plain(1), failure=Failure(1, "", "")),
    "layout-of-a-number": ValueTransfer(1, Plain(1), Layout((1,), (1,))),
    "layout-of-a-failure": ValueTransfer(1, None, Layout((1,), (1,)), Failure(1, "", "")),
    "more-memory-than-came": ValueTransfer(1, FLAT, Layout((4, 7, 3), (4, 0, 1))),
    "less-memory-than-came": ValueTransfer(1, FLAT, Layout((4, 7, 3), (2, 0, 1))),
    "other-dimensions": ValueTransfer(1, FLAT, Layout((4, 3), (3,))),
    "other-elements": ValueTransfer(1, FLAT, Layout((11,), (5,), is_packed=True)),
    "packed-otherwise": ValueTransfer(1, FLAT, Layout((3, 4), (40, 10), is_packed=True)),
    "empty": ValueTransfer(1, TensorHeader("float32", (0,), (1,)), Layout((0,), (9,))),
    "expanded-beyond-counting": ValueTransfer(1, TensorHeader("int8", (1,), (1,)), Layout((2**32, 2**32), (0, 0))),
    "stride-beyond-counting": ValueTransfer(1, TensorHeader("int8", (1,), (1,)), Layout((1,), (2**63,))),
    "laid-out-over-all-memory": ValueTransfer(1, TensorHeader("int8", (2,), (1,)), Layout((2,), (MAX_BODY_BYTES,),
                                                                                 is_packed=True)),
}


def test_a_good_one_passes() -> None:
    transfers.check(GOOD)


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_transfer_that_does_not_add_up_is_refused(lie: ValueTransfer) -> None:
    with pytest.raises(ProtocolError):
        transfers.check(lie)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 4), max_size=4), st.data())
def test_no_layout_reaches_beyond_its_tensor(size: list[int], data: st.DataObject) -> None:
    stride = data.draw(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 4), min_size=len(size), max_size=len(size)))
    length = data.draw(st.integers(0, 30))
    layout = Layout(tuple(size), tuple(stride), data.draw(st.booleans()))
    transfer = ValueTransfer(1, TensorHeader("int8", (length,), (1,)), layout)
    try:
        transfers.check(transfer)
    except ProtocolError:
        return
    if layout.is_packed and math.prod(size) and sum((n - 1) * s for n, s in zip(size, stride, strict=True)) > 2**20:
        return
    value = transfers.unpack(transfer, torch.zeros(length, dtype=torch.int8), EXECUTOR.adopt)
    assert (tuple(value.size()), tuple(value.stride())) == (layout.size, layout.stride)
