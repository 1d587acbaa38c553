"""Files of ``torch.save`` in a model store: their storages are found without their pickle, or they are refused."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn_plugins.common.files import tensor_files
from djinn_plugins.common.files.tensor_files import describe
from djinn_plugins.server.kinds.store import TensorExtent

CONTENTS = (bytes(range(40)), b"", bytes(100))


def saved(*contents: bytes) -> bytes:
    file = io.BytesIO()
    torch.save([torch.tensor([*content], dtype=torch.uint8) for content in contents], file)
    return file.getvalue()


SAVED = saved(*CONTENTS)


def described(data: bytes) -> Mapping[str, TensorExtent]:
    descriptor = os.memfd_create("file")
    try:
        os.write(descriptor, data)
        return describe(descriptor)
    finally:
        os.close(descriptor)


def stored(data: bytes) -> dict[str, bytes]:
    return {name: data[extent.begin:extent.end] for name, extent in described(data).items()}


def test_storages_lie_where_the_directory_says() -> None:
    assert stored(SAVED) == {f"data/{number}": content for number, content in enumerate(CONTENTS)}


def test_the_numbers_of_large_archives_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "ALIGNMENT", 1)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number, content in enumerate(CONTENTS):
            archive.writestr(f"large/data/{number}", content)
    assert stored(file.getvalue()) == {f"data/{number}": content for number, content in enumerate(CONTENTS)}


def test_other_archives_and_bare_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("other/data/0", bytes(200))
    with pytest.raises(ValueError, match="data/0 is not as torch.save writes it"):
        described(path.read_bytes())
    torch.save([torch.zeros(3)], path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="it is a pickle"):
        described(path.read_bytes())


def test_no_safetensors_file_is_taken_for_another() -> None:
    for length in (0x80, 0x280, 0x0450):
        assert described(length.to_bytes(8, "little") + b"{}".ljust(length)) == {}


@given(st.lists(st.tuples(st.integers(0, len(SAVED) - 1), st.integers(0, 255)), min_size=1, max_size=4),
       st.integers(0, len(SAVED)))
def test_a_damaged_archive_is_refused_or_its_storages_lie_inside(changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(SAVED)
    for position, byte in changes:
        data[-1 - position] = byte
    for damaged in (data, data[:length]):
        try:
            found = described(damaged)
        except ValueError:
            continue
        assert all(0 <= extent.begin <= extent.end <= len(damaged) for extent in found.values())
        assert all(extent.size == (extent.end - extent.begin,) for extent in found.values())
