"""Headers of safetensors files: what does not fit is refused with its fault, and before much is built of it."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from djinn_plugins.common.files import safetensors_header
from djinn_plugins.common.files.safetensors_header import MAX_HEADER_BYTES, read_header
from djinn_plugins.common.files.tensor_extents import TensorExtent


def header_of(folder: Path, header: bytes, data: int = 0) -> Any:
    path = folder / "file"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def tensor(name: str = "x", shape: Any = (2,), dtype: str = "F32", offsets: Any = (0, 8)) -> str:
    return f'"{name}":' + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    data = save({"a": torch.ones(2, 3), "b": torch.ones(0, 4), "é": torch.tensor(True)},
                {"format": "pt", "x": '{"y": [1]}'})
    length = struct.unpack("<Q", data[:8])[0]
    found = header_of(tmp_path, data[8:8 + length], len(data) - 8 - length)
    assert found["a"] == TensorExtent("float32", (2, 3), found["a"].begin, found["a"].begin + 24)
    assert {name: extent.size for name, extent in found.items()} == {"a": (2, 3), "b": (0, 4), "é": ()}


@pytest.mark.parametrize(("header", "fault"), [
    ("{" + tensor() + "," + tensor() + "}", "a name occurs twice"),
    ('{"x":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', "a field occurs twice"),
    ('{"__metadata__":{"a":"b","a":"c"},' + tensor() + "}", "a name occurs twice"),
    ('{"__metadata__":{"a":[1]},' + tensor() + "}", "malformed"),
    ("{" + tensor("x", (2**200, 0), offsets=(0, 0)) + "}", "malformed"),
    ("{" + tensor("x", (2**62, 0, 4), offsets=(0, 0)) + "}", "which no tensor has"),
    ("{" + tensor("\\ud800") + "}", "malformed"),
    ("{" + tensor("x" * 1025) + "}", "1025 characters"),
    ("{" + tensor(shape=[[2]]) + "}", "malformed"), ("[]", "malformed"), ("{" + tensor(dtype="F99") + "}", "F99"),
])
def test_a_fault_is_named(header: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=fault):
        header_of(tmp_path, header.encode(), 8)


NESTED = {"deep": b'{"a":' + b"[" * 2**20, "wide": b'{"a":[' + b"[]," * 2**18 + b"[]]}",
          "objects": b'{"a":' + b'{"b":' * 2**17 + b"1" + b"}" * 2**17 + b"}",
          "numbers": b'{"a":[' + b"1," * 2**18 + b"1]}",
          "in the metadata": b'{"__metadata__":{"a":[' + b"[]," * 2**18 + b"1]}}",
          "names": b"{" + b",".join(b'"%d":1' % number for number in range(2**17)) + b"}"}


@pytest.mark.parametrize("kind", list(NESTED))
def test_a_mebibyte_of_nested_text_is_refused_before_it_is_built(kind: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="malformed|brackets"):
            header_of(tmp_path, NESTED[kind])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The header itself, and its names up to the limit.
    assert peak_bytes < (24 if kind == "names" else 4) * 2**20


def test_a_long_header_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 2**16)
    with pytest.raises(ValueError, match="its header would have 1048576 bytes, and 65536 are the limit"):
        header_of(tmp_path, bytes(2**20))
    assert MAX_HEADER_BYTES == 8 * 2**20
