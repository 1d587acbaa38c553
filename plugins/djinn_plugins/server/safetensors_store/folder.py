"""Which files in a folder are models, and how they are called.

A model is a file ``NAME.safetensors``, or a folder with such files; ``NAME@REVISION`` has a revision. A folder of
Hugging Face's cache, ``models--OWNER--NAME``, has a model for each of its snapshots, and for each part of a pipeline in
it. A model may have its shards or its whole in one file, under the names that transformers and diffusers use. They name
variants, too, such as ``model.fp16.safetensors`` beside ``model.safetensors``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import attrs
import msgspec
from msgspec import Meta

__all__ = ("SUMS", "Candidate", "candidates", "expected_digests", "files_of")

SUMS = "SHA256SUMS"
SUFFIX = ".safetensors"
ARCHIVES = (".pt", ".pth")
"""Suffixes of files of ``torch.save``, which belong to their names."""
_WHOLES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_INDEX = ".index.json"
_VARIANT = re.compile(r"(?:model|diffusion_pytorch_model)(?:\.([A-Za-z]\w*)(?:-\d+-of-\d+)?\.safetensors|"
                      r"\.safetensors\.index\.([A-Za-z]\w*)\.json)")
"""A file of a variant, or the index of one."""
_HUB = "models--"
MAX_INDEX_BYTES = 64 * 2**20
MAX_DEPTH = 4
"""Folders below the store's that are looked into."""
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_BLOB = re.compile(r"[0-9a-f]{64}")


class _Index(msgspec.Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[^/\\\0]+\.safetensors$")]]


@attrs.frozen
class Candidate:
    """A model as its place in the folder describes it.

    Attributes:
        name: Its name.
        revision: Its revision, or empty.
        path: The file or folder.
        variant: Its variant, or empty.
    """

    name: str
    revision: str
    path: Path
    variant: str = ""


def candidates(root: Path) -> Iterator[Candidate]:
    """List the models of a folder, by name.

    Raises:
        OSError: The folder cannot be read.
    """
    yield from _below(root, root, 0)


def _below(root: Path, folder: Path, depth: int, *, is_model: bool = False) -> Iterator[Candidate]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        try:
            found = list(_in_folder(root, path, depth, is_model=is_model)) if path.is_dir() else None
        except (OSError, RuntimeError):
            # It may be another user's, or be removed at this moment. Its files are looked at later, and say why.
            found = [_named(path.relative_to(root), path)]
        if found is not None:
            yield from found
        elif is_model:
            continue
        elif path.name.endswith(SUFFIX):
            yield _named(path.relative_to(root).with_name(path.name.removesuffix(SUFFIX)), path)
        elif path.suffix in ARCHIVES:
            yield Candidate(path.relative_to(root).as_posix(), "", path)


def _in_folder(root: Path, path: Path, depth: int, *, is_model: bool) -> Iterator[Candidate]:
    if path.name.startswith(_HUB):
        yield from _snapshots(path)
        return
    if has_weights := _has_weights(path):
        yield from _variants(_named(path.relative_to(root), path))
    if depth < MAX_DEPTH and not path.is_symlink():
        # Below a model, there may be its parts; loose files there, such as its original form, are no models.
        yield from _below(root, path, depth + 1, is_model=is_model or has_weights)


def _has_weights(path: Path) -> bool:
    return any(path.glob(f"*{SUFFIX}")) or any(any(path.glob(f"{whole}.index*.json")) for whole in _WHOLES)


def _variants(plain: Candidate) -> Iterator[Candidate]:
    """Divide a folder into the variants of its model; the weights of none are one, too."""
    found = {_variant_of(path.name) for path in plain.path.iterdir() if SUFFIX in path.name}
    yield from (attrs.evolve(plain, variant=variant) for variant in sorted(found))


def _variant_of(name: str) -> str:
    match = _VARIANT.fullmatch(name)
    return "" if match is None else match[1] or match[2]


def _with_variant(name: str, variant: str) -> Path:
    """Return a file's name as transformers and diffusers write it for a variant."""
    path = Path(name)
    return path.with_suffix(f".{variant}{path.suffix}") if variant else path


def _named(relative: Path, path: Path) -> Candidate:
    name, _, revision = relative.name.partition("@")
    return Candidate(relative.with_name(name or relative.name).as_posix(), revision if name else "", path)


def _snapshots(path: Path) -> Iterator[Candidate]:
    name = path.name.removeprefix(_HUB).replace("--", "/")
    snapshots = path / "snapshots"
    for snapshot in sorted(snapshots.iterdir()) if snapshots.is_dir() else ():
        for part in (snapshot, *sorted(snapshot.glob("*/"))):
            if _has_weights(part):
                full = "/".join((name, *part.relative_to(snapshot).parts))
                yield from _variants(Candidate(full, snapshot.name, part))


def files_of(candidate: Candidate) -> list[Path]:
    """List the files of a model: those that its index names, or the one that is the whole model, or all.

    Raises:
        ValueError: The index is malformed.
        OSError: The folder cannot be read.
    """
    path = candidate.path
    if not path.is_dir():
        return [path]
    wholes = [path / _with_variant(name, candidate.variant) for name in _WHOLES]
    for index in (path / _with_variant(f"{name}{_INDEX}", candidate.variant) for name in _WHOLES):
        if index.exists():
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError(f"{index.name} has more than {MAX_INDEX_BYTES} bytes")
            try:
                found = _index_decoder.decode(index.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{index.name} is malformed: {error}") from None
            return [path / name for name in sorted(set(found.weight_map.values()))]
    whole = next((whole for whole in wholes if whole.exists()), None)
    if whole is not None:
        return [whole]
    files = sorted(file for file in path.iterdir()
                   if file.name.endswith(SUFFIX) and _variant_of(file.name) == candidate.variant)
    if not files:
        raise ValueError(f"{path.name} has a folder that cannot be read")
    return files


def expected_digests(candidate: Candidate, files: list[Path]) -> dict[str, str]:
    """Return the digests that files should have, by name: those of ``SHA256SUMS``, or in the cache of a hub.

    Raises:
        ValueError: The file of digests is malformed, or does not name a file.
        OSError: It cannot be read.
    """
    folder = candidate.path if candidate.path.is_dir() else candidate.path.parent
    sums = folder / SUMS
    if not sums.exists():
        return {path.name: blob for path in files
                if path.is_symlink() and _BLOB.fullmatch(blob := path.readlink().name)}
    made = {}
    for number, line in enumerate(filter(None, sums.read_text(encoding="utf-8").splitlines()), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} of {SUMS} is no digest with a name")
        made[match[2].removeprefix("./")] = match[1].lower()
    for path in files:
        if path.name not in made:
            raise ValueError(f"{path.name} is not in {SUMS}: it was renamed or added")
    return made


_index_decoder = msgspec.json.Decoder(_Index)
