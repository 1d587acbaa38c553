"""Libraries whose lists of accelerators are closed: what they ask, and the answer that names the remote device.

`torch.accelerator` says what the accelerator is, and more and more libraries ask it. These do not yet. An entry goes
when its library asks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.run.replacing import Replacement

__all__ = ("replacements",)


def replacements(device: torch.device) -> list[Replacement]:
    """List the functions to replace.

    Args:
        device: The remote device.
    """
    def instead(answer: Callable[[], Any]) -> Callable[[Any], Any]:
        return lambda original: functools.wraps(original)(lambda *args, **kwargs: answer())

    return [
        Replacement("transformers.utils.import_utils", "is_torch_bf16_gpu_available", instead(_has_bfloat16)),
        Replacement("transformers.pipelines.base", "Pipeline.__init__", functools.partial(_pipeline, device)),
        Replacement("transformers.cache_utils", "Cache.update", functools.partial(_offloading, device)),
        Replacement("sentence_transformers.util.environment", "get_device_name", instead(lambda: str(device))),
        Replacement("accelerate.state", "PartialState._prepare_backend", _process_group),
        Replacement("accelerate.utils.modeling", "get_max_memory", _max_memory),
        Replacement("accelerate.utils.modeling", "get_grad_scaler", functools.partial(_grad_scaler, device)),
        Replacement("accelerate.accelerator", "Accelerator.__init__", functools.partial(_half_precision, device)),
    ]


def _has_bfloat16() -> bool:
    module: Any = torch.get_device_module(devices.logical_device())
    return bool(module.is_bf16_supported())


def _pipeline(device: torch.device, original: Any) -> Any:
    """A pipeline that names no device, or the first one, is on the remote device."""
    @functools.wraps(original)
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        place = kwargs.get("device")
        if place is None and getattr(model, "hf_device_map", None) is None:
            place = 0
        if isinstance(place, int) and place >= 0:
            kwargs["device"] = torch.device(device.type, place)
        original(self, model, *args, **kwargs)

    return init


def _offloading(device: torch.device, original: Any) -> Any:
    """A cache on the remote device moves layers to the CPU and back without streams of CUDA."""
    @functools.wraps(original)
    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        if not self.offloading or keys.device.type != device.type:
            return original(self, keys, values, layer, *args, **kwargs)
        self.offloading = False
        try:
            made = original(self, keys, values, layer, *args, **kwargs)
        finally:
            self.offloading = True
        self.prefetch(layer + 1, self.only_non_sliding)
        self.offload(layer, self.only_non_sliding)
        return made

    return update


def _max_memory(original: Any) -> Any:
    """``device_map="auto"`` fills the remote devices first. Integers name them, as they name all accelerators."""
    kind = devices.logical_device().type
    size_of: Callable[[Any], int] = sys.modules[original.__module__].convert_file_size_to_int

    @functools.wraps(original)
    def get_max_memory(max_memory: Any = None) -> Any:
        if max_memory is None:
            module: Any = torch.get_device_module(devices.logical_device())
            remote = {f"{kind}:{index}": module.mem_get_info(index)[0] for index in range(module.device_count())}
            return {**remote, "cpu": original(None)["cpu"]}
        named = {f"{kind}:{place}" if isinstance(place, int) else place: size for place, size in max_memory.items()}
        remote = {place: size_of(size) for place, size in named.items() if place.startswith(kind)}
        return {**remote, **original({place: size for place, size in named.items() if place not in remote})}

    return get_max_memory


def _process_group(original: Any) -> Any:
    """Processes that a launcher has started train together; accelerate would let each train alone."""
    @functools.wraps(original)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        chosen, kind = original(self, cpu, sagemaker_dp, backend)
        if cpu or kind.name != "NO" or int(os.environ.get("WORLD_SIZE", "1")) < 2:  # more than one
            return chosen, kind
        # Its type for GPUs names devices by ranks; sharding requires that type, and does not name any.
        is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        return backend or "gloo", type(kind)["MULTI_GPU" if is_sharded else "MULTI_CPU"]

    return prepare


def _grad_scaler(device: torch.device, original: Any) -> Any:
    @functools.wraps(original)
    def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
        if distributed_type is not None and distributed_type.name == "FSDP":
            return original(distributed_type, **kwargs)
        return torch.amp.GradScaler(device.type, **kwargs)

    return get_grad_scaler


def _half_precision(device: torch.device, original: Any) -> Any:
    """Add the device to the list of those that accelerate lets use fp16: a constant of the function."""
    code = original.__code__
    constants = tuple((*one, device.type) if isinstance(one, tuple) and {"cuda", "xpu", "mps"} <= set(map(str, one))
                      else one for one in code.co_consts)
    if constants == code.co_consts:
        raise LookupError("no list of devices with fp16")
    made = type(original)(code.replace(co_consts=constants), original.__globals__, original.__name__,
                          original.__defaults__, original.__closure__)
    return functools.update_wrapper(made, original)
