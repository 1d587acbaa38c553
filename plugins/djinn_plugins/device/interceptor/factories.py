"""The device's kernels: all functions that create a tensor on it use them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

from djinn.errors import UnsupportedTensorError
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.common.once import registering
from djinn_plugins.common.tracing.intercepts import INTERCEPTS
from djinn_plugins.device.interceptor import attention, destinations, pinning
from djinn_plugins.device.interceptor import in_place_move as adoption
from djinn_plugins.device.sparse import kernels

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
"""Factories that PyTorch would build from an empty tensor and an ``out=`` variant; these have their own kernels."""

WHOLE = ("mish_backward", "native_channel_shuffle", "one_hot", "silu_backward")
"""Composites that are something else on this device: others have kernels, or check what they are given."""
_FLOATING = frozenset(
    "bartlett_window blackman_window empty empty_permuted empty_strided eye fft_fftfreq fft_rfftfreq hamming_window "
    "hann_window kaiser_window linspace logspace normal ones rand randn scalar_tensor zeros "
    "_efficientzerotensor".split()
)
"""Factories whose results have the default dtype unless another one is given."""
_BY_ENDS = frozenset("linspace logspace".split())
"""Of these, the factories whose results are complex if an end is."""
_BY_VALUE = frozenset("arange full range".split())
"""As above, if their numbers are not integers; ``range`` always."""


def register() -> None:
    """Register the kernels. Called once per process."""
    with registering("_", "IMPL") as catch_all, registering("aten", "IMPL") as aten, warnings.catch_warnings():
        catch_all.fallback(_dispatch, "PrivateUse1")
        # PyTorch warns if a composite gets its own kernel, which is intended here.
        warnings.simplefilter("ignore")
        for name in (*DIRECT, *WHOLE):
            aten.impl(name, _kernel(name), "PrivateUse1")
        aten.impl("_to_copy", _to_copy, "PrivateUse1")
        aten.impl("lift_fresh", _lift_fresh, "PrivateUse1")
        aten.impl("_local_scalar_dense", _kernel("_local_scalar_dense"), "PrivateUse1")
        aten.impl("scaled_dot_product_attention", attention.kernel, "AutogradPrivateUse1")
        for name in destinations.NAMES:
            aten.impl(name, destinations.kernel(name, _operator), "AutogradPrivateUse1")
        pinning.register(aten)
        adoption.register(aten, _kernel, _operator)
    kernels.register()


@cache
def _operator(name: str) -> Any:
    """Return an operator. Making its object takes time, so it is made when it is first called."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(name: str) -> Any:
    plain = name.partition(".")[0]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is None and (plain in _FLOATING or plain in _BY_VALUE):
            _complete(plain, args, kwargs)
        _check_for_data(args)
        if kwargs.get("layout") is torch.jagged and plain == "scalar_tensor":
            # A number beside a jagged tensor, which is a strided tensor all the same.
            kwargs["layout"] = None
        INTERCEPTS["factories"] += 1
        return runtime.current().dispatch(_operator(name), args, kwargs)

    return kernel


def _dispatch(operator: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("dtype") is None and operator.overloadpacket.__name__ in _FLOATING:
        _complete(operator.overloadpacket.__name__, args, kwargs)
    INTERCEPTS["factories"] += 1
    return runtime.current().dispatch(operator, args, kwargs)


def _complete(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the default dtype explicit: it is this process's current one."""
    numbers = args[1:2] if name == "full" else args[:2] if name in _BY_ENDS else args
    if ((name in _BY_VALUE and name != "range") or name in _BY_ENDS) and any(map(_is_complex, numbers)):
        kwargs["dtype"] = torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    elif name not in _BY_VALUE or name == "range" or any(isinstance(number, float) for number in numbers):
        kwargs["dtype"] = torch.get_default_dtype()


def _is_complex(number: Any) -> bool:
    return number.is_complex() if isinstance(number, torch.Tensor) else isinstance(number, complex)


def _check_for_data(args: tuple[Any, ...]) -> None:
    """Look for a tensor on the device that is not lazy; whatever is done with it, it is detached or copied first.

    Raises:
        UnsupportedTensorError: There is one.
    """
    for item in args:
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == devices.logical_device().type:
            raise UnsupportedTensorError("A tensor that was made of a remote tensor's DLPack capsule has no data.",
                                         hint="Use the remote tensor itself, or make the capsule of its cpu().")


def _to_copy(tensor: torch.Tensor, **kwargs: Any) -> Any:
    _check_for_data((tensor,))
    return runtime.current().dispatch(torch.ops.aten._to_copy.default, (tensor,), kwargs)


def _lift_fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, LazyTensor) else runtime.current().upload(tensor)
