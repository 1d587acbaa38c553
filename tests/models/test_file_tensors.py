"""Tensors are found in files that were noted, and only equal ones of a file that is still the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from djinn_plugins.common.files.identity import identity_in
from djinn_plugins.models import file_tensors as finding
from djinn_plugins.models import noted_files
from djinn_plugins.models.file_digests import Digested
from djinn_plugins.models.file_tensors import file_tensors, is_equal

WEIGHT = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, empty in ((noted_files, "_paths", {}), (noted_files, "_new", set()), (finding, "_described", {}),
                                (finding, "_alike", {})):
        monkeypatch.setattr(module, name, empty)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    save_file({"first": WEIGHT, "second": WEIGHT + 1, "half": WEIGHT.half()}, made)
    noted_files.note(made)
    return made


def changed(place: int) -> torch.Tensor:
    made = WEIGHT.clone()
    made.view(-1)[place] += 1
    return made


def test_a_tensor_is_found_by_its_content(path: Path) -> None:
    assert [found.name for found in file_tensors(WEIGHT)] == ["first"]
    assert [found.name for found in file_tensors(WEIGHT + 1)] == ["second"]
    assert {found.name for found in file_tensors(WEIGHT.half())} == {"first", "half"}
    assert not file_tensors(WEIGHT.view(300, 200))
    assert not file_tensors(WEIGHT.double())


@pytest.mark.parametrize("place", [0, 500, 30_000, 59_999])
def test_one_other_element_makes_it_another_tensor(path: Path, place: int) -> None:
    state = Digested(identity_in(path.stat()), "")
    assert all(is_equal(found, state, WEIGHT) for found in file_tensors(WEIGHT))
    found = [each for each in file_tensors(WEIGHT) if each.name == "first"]
    assert not is_equal(found[0], state, changed(place))
    assert not is_equal(found[0], state, changed(place).half())


def test_a_file_with_another_identity_is_not_equal(path: Path) -> None:
    state, (found, *_) = Digested(identity_in(path.stat()), ""), file_tensors(WEIGHT)
    assert is_equal(found, state, WEIGHT)
    path.chmod(0o600 if path.stat().st_mode & 0o77 else 0o644)
    assert not is_equal(found, state, WEIGHT), "its status has changed, so its content may have, too"
    os.truncate(path, 100_000)
    assert not is_equal(found, Digested(identity_in(path.stat()), ""), WEIGHT)


def test_the_file_that_was_read_last_is_the_first_and_a_file_that_was_replaced_is_read_again(
    path: Path, tmp_path: Path
) -> None:
    assert file_tensors(WEIGHT)[0].path == str(path)
    other = tmp_path / "other.safetensors"
    save_file({"x": WEIGHT}, other)
    noted_files.note(other)
    assert [Path(found.path).name for found in file_tensors(WEIGHT)][:2] == ["other.safetensors", "model.safetensors"]
    save_file({"x": WEIGHT * 2}, other)
    noted_files.note(other)
    assert [Path(found.path).name for found in file_tensors(WEIGHT)] == ["model.safetensors"]
    assert file_tensors(WEIGHT * 2)[0].path == str(other)


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len([*folder.iterdir()]) if folder.exists() else 0


def test_few_files_are_noted_and_none_is_kept_open(tmp_path: Path) -> None:
    for number in range(noted_files.MAX_FILES + 10):
        noted_files.note(tmp_path / f"{number}.safetensors")
    assert len(noted_files.noted()) == noted_files.MAX_FILES
    assert str(tmp_path / "5.safetensors") not in noted_files.noted()
    for name in (None, 3.5, "with\0zero"):
        noted_files.note(name)
    descriptors = open_files()
    assert not file_tensors(torch.zeros(400, 500))
    assert open_files() <= descriptors
