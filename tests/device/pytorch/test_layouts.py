"""Layouts and dtypes: complex and conjugated, small floats, sparse, nested, quantized; names, storages, sharing."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs, values

from djinn.errors import DjinnError


def _z(device: str) -> torch.Tensor:
    return torch.complex(torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)).to(device)


def conjugates(device: str) -> Any:
    z = _z(device)
    c = z.conj()
    return (
        c, c.is_conj(), c.resolve_conj(), c.resolve_conj().is_conj(), c.clone(), c.clone().is_conj(), c.t().clone(),
        c.conj().is_conj(), c + 1, c @ z.t(), z.H, z.mH, z.adjoint(), z.H.is_conj(), c.real.clone(), c.imag.clone(),
        torch._neg_view(c.real).is_neg(),
        torch.view_as_real(z), torch.view_as_real(c.resolve_conj()), outcome(lambda: torch.view_as_real(c)), c.abs(),
        c.angle(), c.sum(), c.tolist(), torch.vdot(z[0], z[1]), torch.equal(c, z.conj_physical()), c.cpu().tolist(),
        z.is_complex(), torch.is_complex(c), c.imag.sum(), c[:, 1:].clone().imag, c.contiguous().clone(),
        c.is_contiguous(),
        torch.real(c),
        c.to(torch.complex128), z.conj().requires_grad_().imag.sum(),
    )


def conjugate_writes(device: str) -> Any:
    z = _z(device)
    z.imag.mul_(3)
    z.real[0] = 9
    c = z.conj()
    c.add_(1j)
    c[0, 0] = 5 + 5j
    z.conj().imag.add_(1)
    c.mul_(2)
    y = torch.zeros(2, 3, dtype=torch.complex64).to(device)
    y.copy_(c)
    torch.add(c, 1, out=y[:, :])
    return z, c, y, z.conj_physical_(), torch.conj_physical(y)


def conjugate_gradients(device: str) -> Any:
    z = _z(device).requires_grad_()
    (z.conj() * z).sum().backward(torch.tensor(1.0 + 0j).to(device))
    first = z.grad.clone()
    (z.imag * z.conj().real).sum().backward()
    return first, z.grad


def complex_mathematics(device: str) -> Any:
    z = _z(device)
    half = z.to(torch.complex128)
    return (
        torch.polar(z.real, z.imag), z.exp(), z.sqrt(), torch.fft.fft(z), torch.fft.ifft2(half), z.abs(), z.sgn(),
        torch.view_as_complex(torch.ones(2, 2).to(device)), z.pow(2), z.eq(z), z.mean(), z.cumsum(0),
        torch.linalg.inv(half[:, :2]), torch.fft.rfft(z.real),
        z.prod(),
    )


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:Casting complex values")
def test_every_dtype_does_what_it_does_in_eager(dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        x = torch.tensor([0.0, 1.0, 2.0, 3.0]).to(dtype).to(device)
        return [outcome(action) for action in (
            lambda: x.view(torch.uint8 if dtype.itemsize == 1 else dtype).tolist(), lambda: x.to(torch.float32),
            x[1:3].clone, lambda: torch.zeros(2, dtype=dtype, device=device).float(), x.tolist, x[1].item,
            lambda: values(x + x), lambda: values(x * 2), lambda: values(x.eq(x)), lambda: x.sum().item(),
            lambda: torch.cat([x, x]).tolist(), x.element_size, lambda: x.nbytes, x.is_floating_point, x.is_signed,
            lambda: torch.arange(3, dtype=dtype, device=device).tolist(), lambda: x.copy_(torch.ones(4)).tolist(),
            lambda: torch.full((2,), 1, dtype=dtype, device=device).tolist(), lambda: values(x > 1),
            lambda: x.reshape(2, 2).t().contiguous().stride(), lambda: repr(x.cpu()), lambda: values(x.sort().values),
            lambda: x.masked_fill(torch.tensor([True] * 4).to(device), 0).tolist(), lambda: x.flip(0).tolist(),
            lambda: values(x @ x), lambda: x.abs().tolist(), lambda: x.nonzero().tolist(), lambda: values(x[[1, 0]]),
        )]

    assert_same(program)


def questions(device: str) -> Any:
    x = torch.ones(2, 3, 4, 5).to(device).to(memory_format=torch.channels_last)
    y = torch.ones(2, 3).to(device)
    return (
        x, x.is_contiguous(), x.is_contiguous(memory_format=torch.channels_last), x.contiguous(), x.stride(),
        x.element_size(),
        x.nbytes, x.itemsize, x.layout, x.is_sparse, x.is_quantized, x.is_nested, x.is_mkldnn, x.is_inference(),
        x.is_meta, x.dim_order(), x.is_set_to(x), y.is_set_to(x), x.nelement(), y.type() != "", y.is_leaf,
        x.clone(memory_format=torch.preserve_format), torch.empty_like(x).stride(), x.is_same_size(x),
        torch.is_tensor(y), torch.is_storage(y), torch.is_nonzero(y[0, 0]), y.ndimension(),
        y.get_device() == (0 if device != "cpu" else -1),
        torch.conv2d(x, torch.ones(2, 3, 2, 2).to(device)), torch.result_type(y, 1.5),
        torch.can_cast(y.dtype, torch.int32),
        torch.promote_types(y.dtype, torch.float64), y.mT, y.T, torch.numel(x), x.untyped_storage().nbytes(),
        x._is_view(), y[0]._is_view(), y[0]._base is y, y.is_neg(), y.output_nr,
    )


@programs(conjugates, conjugate_writes, conjugate_gradients, complex_mathematics, questions)
def test_layouts_equal_eager(program: Program) -> None:
    assert_same(program)


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _lazy() -> torch.Tensor:
    return torch.eye(3, device=DEVICE)


CLEARLY_REFUSED: dict[str, Callable[[], Any]] = {
    "coo_copied": lambda: _lazy().copy_(_sparse()),
    "nested_moved": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(DEVICE),
    "nested_made": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=DEVICE),
    "nested_of_lazy": lambda: torch.nested.as_nested_tensor([_lazy()[0], _lazy()[1, :2]]),
    "nested_listed": lambda: torch.nested.as_nested_tensor([torch.ones(3), torch.ones(2)], device=DEVICE),
    "quantized_moved": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to(DEVICE),
    "quantized_made": lambda: torch.quantize_per_tensor(_lazy(), 0.1, 0, torch.qint8),
    "quantized_per_channel": lambda: torch.quantize_per_channel(_lazy(), torch.ones(3), torch.zeros(3), 0, torch.qint8),
    "mkldnn_made": lambda: _lazy().to_mkldnn(),
    "mkldnn_moved": lambda: torch.ones(2, 2).to_mkldnn().to(DEVICE),
    "dlpack": lambda: torch.from_dlpack(_lazy()),
    "storage": lambda: _lazy().untyped_storage()[0],
}


@pytest.mark.parametrize("name", CLEARLY_REFUSED)
def test_what_has_no_remote_form_is_refused_and_says_what_to_do(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((DjinnError, NotImplementedError, RuntimeError)) as refusal:
            CLEARLY_REFUSED[name]()
    text = str(refusal.value)
    assert not isinstance(refusal.value, DjinnError) or "onvert" in text or "Use " in text
    assert torch.eye(3, device=DEVICE).sum().item() == 3.0


BYTES = ("float4_e2m1fn_x2", "bits8", "bits2x4", "int4", "uint1", "uint7")


def as_bytes(device: str, *, name: str) -> Any:
    dtype = getattr(torch, name)
    raw = torch.arange(8, dtype=torch.uint8).view(2, 4)
    packed = raw.to(device).view(dtype)
    module = torch.nn.Module()
    module.register_buffer("weight", raw.view(dtype))

    def saved() -> Any:
        buffer = io.BytesIO()
        torch.save(packed, buffer)
        buffer.seek(0)
        return torch.load(buffer, map_location=device).cpu().view(torch.uint8).tolist()

    made = (packed, raw.view(dtype).to(device), packed[1], packed.reshape(-1), packed.t(), module.to(device).weight)
    sizes = torch.empty(3, dtype=dtype, device=device).shape, torch.empty_like(packed).shape
    refused = [outcome(action) for action in (
        saved, lambda: torch.add(packed, packed).cpu().dtype, lambda: packed.float().cpu(), packed[0, 0].item)]
    return [(item.cpu().view(torch.uint8).tolist(), item.dtype, item.stride()) for item in made], sizes, refused


@programs(*(functools.partial(as_bytes, name=name) for name in BYTES))
def test_dtypes_without_arithmetic_are_bytes(program: Program) -> None:
    assert_same(program)
