"""The default interceptor, and others that are the default one with a flaw."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch._subclasses import fake_tensor

from djinn.hookspecs import hookimpl
from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor.interceptor import DeviceInterceptor

BROKEN: dict[str, tuple[str, set[str]]] = {
    "doubles": ("interceptor.local_unchanged", set()),
    "draws": ("interceptor.local_unchanged", set()),
    "second-thoughts": ("interceptor.idempotent", set()),
    "starts-thread": ("interceptor.opens_nothing", set()),
    "no-index": ("interceptor.device_real", set()),
    "hides-fakes": ("interceptor.fakes_real", set()),
    "skips-products": ("interceptor.operations_arrive", set()),
}
"""Name of each broken interceptor, the law that it breaks, and others that it may break as a consequence."""


_installed: list[str] = []


class _Interceptor(DeviceInterceptor):
    def __init__(self, flaw: str) -> None:
        self.name = flaw
        self._flaw = flaw

    def install(self) -> torch.device:
        device = super().install()
        _installed.append(self._flaw)
        if self._flaw == "doubles":
            torch.set_default_dtype(torch.float64)
        elif self._flaw == "draws":
            torch.rand(1)
        elif self._flaw == "starts-thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        elif self._flaw == "hides-fakes":
            fake_tensor._check_for_subclass_arg = lambda item: isinstance(item, LazyTensor)
        elif self._flaw == "second-thoughts" and len(_installed) > 1:
            torch.set_default_dtype(torch.float64)
        elif self._flaw == "no-index":
            return torch.device(device.type)
        return device

    def handlers(self, session: Any) -> Any:
        skip = {torch.ops.aten.mul.Tensor: lambda session, operator, args, kwargs: args[0]}
        return {**super().handlers(session), **(skip if self._flaw == "skips-products" else {})}


@hookimpl
def djinn_register_interceptors(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Interceptor(name))
