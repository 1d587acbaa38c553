"""Files of weights that are read onto the device by safetensors and transformers.

``safetensors.torch.load_file`` refuses devices that it does not know, so calls for this device are answered here.
transformers reads files here and moves tensors one by one. If the server has all files of a checkpoint that goes to the
device completely, it is given their tensors on the device instead; so is ``torch.load``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from djinn_lib_run.imports import follow_imports

from djinn.record.devices import logical_device
from djinn_interceptor_device import stored_storages

__all__ = ("install",)

_SAFETENSORS = "safetensors.torch"
_TRANSFORMERS = "transformers.modeling_utils"


def install() -> None:
    """Replace the functions once a program has imported their modules."""
    follow_imports((_SAFETENSORS, _TRANSFORMERS), _adapt)
    read: Any = torch.serialization._load
    torch.serialization._load = stored_storages.noting_address(read)
    # The program's own calls pass through; nothing is loaded here.
    load = torch.load  # noqa: TID251
    torch.load = torch.serialization.load = stored_storages.loading(load, _is_ours)  # noqa: TID251


def _adapt(module: ModuleType) -> None:
    if module.__name__ == _SAFETENSORS:
        module.load_file = _loading(module.load_file)  # type: ignore[attr-defined]  # of that module
        return
    model: Any = getattr(module, "PreTrainedModel", None)
    load = getattr(model, "_load_pretrained_model", None)
    if load is not None:
        model._load_pretrained_model = staticmethod(_loading_checkpoint(load))


def _is_ours(device: Any) -> bool:
    if not isinstance(device, (str, torch.device)):
        return False
    try:
        return torch.device(device).type == logical_device().type
    except RuntimeError:
        return False


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> Any:
        if not _is_ours(device):
            return load(filename, device, **options)
        from djinn_lib_models import models

        return models.load_file(filename, device=device)

    return load_file


def _loading_checkpoint(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_pretrained(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any,
                        **options: Any) -> Any:
        if state_dict is None and getattr(load_config, "hf_quantizer", None) is None:
            state_dict = _stored(checkpoint_files, getattr(load_config, "device_map", None))
        return load(model, state_dict, checkpoint_files, load_config, *rest, **options)

    return load_pretrained


def _stored(files: Any, device_map: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a checkpoint, if it goes to one device of a server that has all of its files."""
    devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
    if len(devices) != 1 or not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    (device,) = devices
    if not _is_ours(device):
        return None
    from djinn_lib_models import models

    return models.stored_files(files, device=device)
