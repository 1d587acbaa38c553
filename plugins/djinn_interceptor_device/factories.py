"""Kernels of the device: whatever creates a tensor on it arrives here."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from djinn import runtime
from djinn.tensor import LazyTensor
from djinn_interceptor_device import pinning

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these objects."""

DIRECT = (
    "arange", "arange.start", "arange.start_step", "bartlett_window", "bartlett_window.periodic", "blackman_window",
    "blackman_window.periodic", "eye", "eye.m", "fft_fftfreq", "fft_rfftfreq", "full", "hamming_window",
    "hamming_window.periodic", "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta", "hann_window",
    "hann_window.periodic", "kaiser_window", "kaiser_window.periodic", "kaiser_window.beta", "linspace",
    "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", "logspace",
    "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor", "normal.float_float", "ones", "rand",
    "rand.generator", "randint", "randint.generator", "randint.low", "randint.low_generator", "randn",
    "randn.generator", "randperm", "randperm.generator", "range", "range.step", "scalar_tensor", "tril_indices",
    "triu_indices", "zeros", "_efficientzerotensor",
)
"""Factories that PyTorch would build on an empty tensor and an ``out=`` variant: those need kernels of their own."""


def register() -> None:
    """Register the kernels. Called once per process."""
    catch_all = torch.library.Library("_", "IMPL")
    catch_all.fallback(_dispatch, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns that a composite gets a kernel of its own, which is the purpose.
        warnings.simplefilter("ignore")
        for name in DIRECT:
            operator = _operator(name)
            aten.impl(name, _kernel(operator), "PrivateUse1")
        aten.impl("_to_copy", _to_copy, "PrivateUse1")
        aten.impl("lift_fresh", _lift_fresh, "PrivateUse1")
        pinning.register(aten)
    _libraries.extend((catch_all, aten))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(operator: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return runtime.current().dispatch(operator, args, kwargs)

    return kernel


def _dispatch(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return runtime.current().dispatch(operator, args, kwargs)


def _to_copy(tensor: torch.Tensor, **kwargs: Any) -> Any:
    return runtime.current().dispatch(torch.ops.aten._to_copy.default, (tensor,), kwargs)


def _lift_fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, LazyTensor) else runtime.current().upload(tensor)
