"""A file is digested for moved weights only when a later change of it will show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from djinn_lib_models import moved_weights
from djinn_lib_models.file_digests import identity_in
from safetensors.torch import save_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(5)}, made)
    return made


def test_a_new_file_is_digested_after_a_tick_of_the_clock_and_once(file: Path) -> None:
    found = moved_weights._digest(file)
    assert found is not None
    assert time.time_ns() - file.stat().st_ctime_ns >= 50 * 10**6
    assert moved_weights._digest(file) is found
    save_file({"x": torch.zeros(5)}, file)
    changed = moved_weights._digest(file)
    assert changed is not None
    assert (changed.digest, changed.identity) != (found.digest, found.identity)


@pytest.mark.parametrize("age_s", [0, 10])
def test_where_the_file_system_keeps_whole_seconds_a_new_file_is_not_digested(
    file: Path, age_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = 10**9 * (time.time_ns() // 10**9 - age_s)

    def coarse(status: os.stat_result) -> object:
        return msgspec.structs.replace(identity_in(status), changed_ns=second)

    monkeypatch.setattr(moved_weights, "identity_in", coarse)
    monkeypatch.setattr(moved_weights, "identified", lambda path: (coarse(path.stat()), "0" * 64))
    monkeypatch.setattr(moved_weights, "described", lambda path: (coarse(file.stat()), {}))
    assert (moved_weights._digest(file) is None) == (age_s == 0)
