"""Files of weights that are read onto the device by safetensors, transformers and diffusers.

``safetensors.torch.load_file`` refuses devices that it does not know, so calls for this device are answered here.
transformers and diffusers read files here and move tensors one by one. If the server has all files of a checkpoint that
goes to the device completely, they are given their tensors on the device instead; so is ``torch.load``. If there are no
such files here, they are given a stored model of that name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from djinn.record.devices import logical_device
from djinn_plugins.common.imports import follow_imports
from djinn_plugins.device.interceptor import files_read, stored_storages

if TYPE_CHECKING:
    from djinn_plugins.common.operators.stored_models import StoreAnswer

__all__ = ("install",)

_SAFETENSORS = "safetensors.torch"
_TRANSFORMERS = "transformers.modeling_utils"
_DIFFUSERS = "diffusers.models.modeling_utils"
_PIPELINES = "diffusers.pipelines.pipeline_utils"
_WEIGHTS = re.compile(r"diffusion_pytorch_model\.(?:([^./]+)\.)?safetensors")
_INDEX = re.compile(r"diffusion_pytorch_model\.safetensors\.index\.(?:([^./]+)\.)?json")
"""What diffusers calls files of weights, of a variant or of none."""
_SUFFIXES = (".safetensors", ".bin")
"""Of files of weights."""
_READ_HERE = ("quantization_config", "parallel_config", "use_flashpack", "dduf_entries")
"""Options of diffusers with which files are read in another way."""
_HUB = "models--"
_target: ContextVar[str | None] = ContextVar("djinn_target", default=None)
"""The one device that a model without quantization is being loaded onto."""


def install() -> None:
    """Replace the functions once a program has imported their modules."""
    files_read.install()
    follow_imports((_SAFETENSORS, _TRANSFORMERS, _DIFFUSERS, _PIPELINES), _adapt)
    read: Any = torch.serialization._load
    torch.serialization._load = stored_storages.noting_address(read)
    # The program's own calls pass through; nothing is loaded here.
    load = torch.load  # noqa: TID251
    torch.load = torch.serialization.load = stored_storages.loading(load, _is_ours)  # noqa: TID251


def _adapt(module: Any) -> None:
    _ADAPTERS[module.__name__](module)


def _adapt_safetensors(module: Any) -> None:
    module.load_file = _loading(module.load_file)


def _adapt_transformers(module: Any) -> None:
    model: Any = getattr(module, "PreTrainedModel", None)
    load = getattr(model, "_load_pretrained_model", None)
    if load is not None:
        model._load_pretrained_model = staticmethod(_loading_checkpoint(load))
        _replace(module, get_hf_quantizer=_noting_target, _get_resolved_checkpoint_files=_finding)


def _adapt_diffusers(module: Any) -> None:
    _adapt_loading(module, "ModelMixin", _get_model_file=_finding_file, _get_checkpoint_shard_files=_finding_shards)


def _adapt_loading(module: Any, name: str, **replacements: Callable[[Any], Any]) -> None:
    """Let a class of diffusers note the device that it loads for, and the functions of its module look there."""
    loaded: Any = getattr(module, name, None)
    load = vars(loaded).get("from_pretrained") if loaded is not None else None
    if isinstance(load, classmethod):
        loaded.from_pretrained = classmethod(_noting_device_map(load.__func__))
        _replace(module, **replacements)


def _replace(module: Any, **replacements: Callable[[Any], Any]) -> None:
    """Replace functions of a module, by name, where this release of the library has them."""
    for name, replacement in replacements.items():
        if hasattr(module, name):
            setattr(module, name, replacement(getattr(module, name)))


def _adapt_pipelines(module: Any) -> None:
    """Let a pipeline's ``device_map`` name the device; it is otherwise ``balanced``, or the kind of the local one."""
    if hasattr(module, "SUPPORTED_DEVICE_MAP"):
        module.SUPPORTED_DEVICE_MAP = _DevicesToo(module.SUPPORTED_DEVICE_MAP)
    _adapt_loading(module, "DiffusionPipeline", _identify_model_variants=_finding_variants)


class _DevicesToo(list[str]):
    def __contains__(self, place: object) -> bool:
        return super().__contains__(place) or _is_ours(place)


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    _SAFETENSORS: _adapt_safetensors, _TRANSFORMERS: _adapt_transformers, _DIFFUSERS: _adapt_diffusers,
    _PIPELINES: _adapt_pipelines}


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
        from djinn_plugins.models import models

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
    from djinn_plugins.models import models

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
        if device is None or path is None or options.get("gguf_file"):
            return resolve(*given, **options)
        where = {**(options.get("download_kwargs") or {}), "variant": options.get("variant")}
        found = _found(str(path), where, device, lambda: resolve(*given, **options))
        if not isinstance(found, _StoredFiles):
            return found
        dtypes = [tensor.dtype for tensor in found.found.tensors if "float" in tensor.dtype]
        return found, {"dtype": dtypes[0]} if dtypes else {}

    return resolved


def _found(path: str, where: Mapping[str, Any], device: str, look_here: Callable[[], Any]) -> Any:
    """Return what is here of a model, or else `_StoredFiles`; an exact revision of the server is preferred."""
    if not Path(path).exists() and (found := _named(path, where, device, is_exact=True)) is not None:
        return found
    try:
        return look_here()
    except OSError as error:
        if (found := _named(path, where, device)) is None:
            error.add_note(f"The server has no model of the name {path} either: see djinn.models.list(). A gated one "
                           "is only there for sessions whose token names it.")
            raise
        return found


def _named(path: str, where: Mapping[str, Any], device: str, *, is_exact: bool = False) -> _StoredFiles | None:
    """Find a stored model by the name of a model, or of its folder; an exact one is known to have the same content."""
    from djinn_plugins.models import models

    names, revision = [path], str(where.get("commit_hash") or where.get("revision") or "")
    if (folder := Path(path)).exists():
        parts = (*folder.resolve().parts, *Path(where.get("subfolder") or "").parts)
        # The name of a pipeline's part alone, such as unet, says nothing.
        is_part = where.get("subfolder") or (folder.parent / "model_index.json").exists()
        names = ["/".join(parts[-count:]) for count in ((3, 2) if is_part else (3, 2, 1))]
        hub = next((index for index, part in enumerate(parts) if part.startswith(_HUB)), None)
        if hub is not None and len(parts) > hub + 2:
            # The cache of the hub: models--OWNER--NAME/snapshots/REVISION, and perhaps a folder of a pipeline's part.
            names = ["/".join((parts[hub].removeprefix(_HUB).replace("--", "/"), *parts[hub + 3:]))]
            revision = parts[hub + 2]
    elif subfolder := where.get("subfolder"):
        names = [f"{path}/{subfolder}"]
    found = models.named(names, revision, device, is_exact=is_exact, variant=where.get("variant") or "")
    return None if found is None else _StoredFiles(found)


def _noting_device_map(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of diffusers that loads a model or a pipeline, for the functions by which it looks for files."""

    @functools.wraps(load)
    def from_pretrained(cls: Any, *given: Any, **options: Any) -> Any:
        device_map = options.get("device_map")
        whole = device_map if isinstance(device_map, dict) else {"": device_map}
        target = _target.set(None if any(map(options.get, _READ_HERE)) else _only_device(whole))
        try:
            return load(cls, *given, **options)
        finally:
            _target.reset(target)

    return from_pretrained


def _finding_variants(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which diffusers looks for the parts of a pipeline that have files of a variant."""

    @functools.wraps(find)
    def identify_model_variants(folder: Any, variant: str | None, config: Mapping[str, Any]) -> Any:
        found, device = find(folder=folder, variant=variant, config=config), _target.get()
        if variant is None or device is None:
            return found
        parts = (part for part in Path(folder).iterdir() if part.is_dir() and part.name in config)
        without = (part for part in parts if not any(file.suffix in _SUFFIXES for file in part.iterdir()))
        there = [part.name for part in without if _named(str(part), {"variant": variant}, device) is not None]
        return {**found, **dict.fromkeys(there, variant)}

    return identify_model_variants


def _finding_file(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which diffusers looks for a file; instead of its name, it may return its tensors."""

    @functools.wraps(find)
    def get_model_file(path: Any, *given: Any, **options: Any) -> Any:
        device, name = _target.get(), str(options.get("weights_name"))
        is_whole = _WEIGHTS.fullmatch(name)
        if device is None or is_whole is None or Path(path, options.get("subfolder") or "", name).with_suffix(
                ".bin").exists():
            # diffusers uses a file with a pickle if there are no others.
            return find(path, *given, **options)
        where = {**options, "variant": is_whole[1]}
        found = _found(str(path), where, device, lambda: find(path, *given, **options))
        stored = _stored(found if isinstance(found, _StoredFiles) else [found], device)
        return found if stored is None else stored

    return get_model_file


def _finding_shards(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which diffusers looks for several files; their tensors may take their place."""

    @functools.wraps(find)
    def get_shards(path: Any, index: Any, *given: Any, **options: Any) -> Any:
        device, is_index = _target.get(), _INDEX.fullmatch(Path(index).name)
        if device is None or is_index is None:
            return find(path, index, *given, **options)
        where = {**options, "variant": is_index[1]}
        found = _found(str(path), where, device, lambda: find(path, index, *given, **options))
        files, about = (found, {}) if isinstance(found, _StoredFiles) else found
        if (stored := _stored(files, device)) is None:
            return found
        return [stored], {**about, "all_checkpoint_keys": [*stored]}

    return get_shards
