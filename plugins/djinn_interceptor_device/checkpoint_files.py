"""Files of weights that are read onto the device by safetensors and transformers.

``safetensors.torch.load_file`` refuses devices that it does not know, so calls for this device are answered here.
transformers reads files here and moves tensors one by one. If the server has all files of a checkpoint that goes to the
device completely, it is given their tensors on the device instead; so is ``torch.load``. If there are no such files
here, it is given a stored model of that name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from djinn_lib_run.imports import follow_imports

from djinn.record.devices import logical_device
from djinn_interceptor_device import stored_storages

if TYPE_CHECKING:
    from djinn_lib_service.stored_models import StoreAnswer

__all__ = ("install",)

_SAFETENSORS = "safetensors.torch"
_TRANSFORMERS = "transformers.modeling_utils"
_HUB = "models--"
_target: ContextVar[str | None] = ContextVar("djinn_target", default=None)
"""The one device that a model without quantization is being loaded onto."""


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
        for name, replacement in (("get_hf_quantizer", _noting_target), ("_get_resolved_checkpoint_files", _finding)):
            if hasattr(module, name):
                setattr(module, name, replacement(getattr(module, name)))


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
        device = _only_device(getattr(load_config, "device_map", None))
        if state_dict is None and device is not None and getattr(load_config, "hf_quantizer", None) is None:
            state_dict = _stored(checkpoint_files, device)
        return load(model, state_dict, checkpoint_files, load_config, *rest, **options)

    return load_pretrained


def _only_device(device_map: Any) -> str | None:
    """Return the device of ours that a model goes to completely."""
    devices = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
    return devices.pop() if len(devices) == 1 and all(map(_is_ours, devices)) else None


def _stored(files: Any, device: str) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a checkpoint, if the server has all of its files."""
    from djinn_lib_models import models

    if isinstance(files, _StoredFiles):
        return models.all_made(files.found, device)
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    return models.stored_files(files, device=device)


class _StoredFiles(list[str]):
    """What transformers takes for the files of a checkpoint that only the server has."""

    def __init__(self, found: StoreAnswer) -> None:
        super().__init__(f"{found.models[0].name}/{file.name}" for file in found.models[0].files)
        self.found = found


def _noting_target(get: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that transformers asks for a quantizer, before it looks for files."""

    @functools.wraps(get)
    def get_hf_quantizer(*given: Any, **options: Any) -> Any:
        quantizer, config, device_map = get(*given, **options)
        _target.set(None if quantizer is not None else _only_device(device_map))
        return quantizer, config, device_map

    return get_hf_quantizer


def _finding(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which transformers looks for files; it also finds models that only the server has."""

    @functools.wraps(resolve)
    def resolved(*given: Any, **options: Any) -> Any:
        device = _target.get()
        path = options.get("pretrained_model_name_or_path")
        if device is None or path is None or any(map(options.get, ("variant", "gguf_file"))):
            return resolve(*given, **options)
        where = options.get("download_kwargs") or {}
        if not Path(path).exists() and (found := _named(str(path), where, device, is_exact=True)):
            return found
        try:
            return resolve(*given, **options)
        except OSError as error:
            if (found := _named(str(path), where, device)) is None:
                error.add_note(f"The server has no model of the name {path} either: see djinn.models.list().")
                raise
            return found

    return resolved


def _named(path: str, where: Mapping[str, Any], device: str, *, is_exact: bool = False
           ) -> tuple[_StoredFiles, dict[str, Any]] | None:
    """Find a stored model by the name of a model, or of its folder; an exact one is known to have the same content."""
    from djinn_lib_models import models

    names, revision = [path], str(where.get("revision") or "")
    if (folder := Path(path)).exists():
        folder = folder.resolve()
        names = ["/".join(folder.parts[-2:]), folder.name]
        if len(folder.parts) > 2 and folder.parts[-3].startswith(_HUB):
            names, revision = [folder.parts[-3].removeprefix(_HUB).replace("--", "/")], folder.name
    if subfolder := where.get("subfolder"):
        names = [f"{name}/{subfolder}" for name in names]
    found = models.named(names, revision, device, is_exact=is_exact)
    if found is None:
        return None
    dtypes = [tensor.dtype for tensor in found.tensors if "float" in tensor.dtype]
    return _StoredFiles(found), {"dtype": dtypes[0]} if dtypes else {}
