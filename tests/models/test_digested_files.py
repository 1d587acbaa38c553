"""A file is digested for moved weights so that a later change of it will show."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from djinn_plugins.models import file_digests, moved_weights


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    made = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(5)}, made)
    return made


@pytest.mark.parametrize("age_s", [0, 100])
def test_a_file_is_digested_once_and_with_its_parts_if_changes_need_not_show(
    file: Path, age_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns
    monkeypatch.setattr(file_digests, "time_ns", lambda: now_ns() + age_s * 10**9)
    found = moved_weights._digest(file)
    assert found is not None
    assert moved_weights._digest(file) is found
    part = hashlib.sha256(torch.ones(5).numpy().tobytes()).digest()
    assert found[0].parts == (None if age_s else {"x": part})
    save_file({"x": torch.zeros(5)}, file)
    changed = moved_weights._digest(file)
    assert changed is not None
    assert found[0].digest != changed[0].digest == hashlib.sha256(file.read_bytes()).hexdigest()
