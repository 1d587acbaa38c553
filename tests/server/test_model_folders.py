"""Which files of a folder are models of the store, and under which names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import time_ns

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from djinn_plugins.common.files.identity import sha256_of
from djinn_plugins.server.safetensors_store import store
from djinn_plugins.server.safetensors_store.folder import candidates, files_of
from djinn_plugins.server.safetensors_store.store import SafetensorsStore

WHOLE = "diffusion_pytorch_model.safetensors"


def found(root: Path) -> dict[tuple[str, ...], list[str]]:
    return {(each.name, each.revision, *filter(None, [each.variant])): [path.name for path in files_of(each)]
            for each in candidates(root)}


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_parts_of_a_pipeline_are_models_beside_the_weights_of_the_whole(tmp_path: Path) -> None:
    write(tmp_path, "sd/whole.safetensors", "sd/model_index.json", f"sd/unet/{WHOLE}",
          "sd/unet/diffusion_pytorch_model.fp16.safetensors", "sd/vae/config.json", "sd/text_encoder/model.safetensors",
          "sd/original/consolidated.pth", "sd/original/more/loose.safetensors")
    assert found(tmp_path) == {("sd", ""): ["whole.safetensors"], ("sd/unet", ""): [WHOLE],
                               ("sd/unet", "", "fp16"): ["diffusion_pytorch_model.fp16.safetensors"],
                               ("sd/text_encoder", ""): ["model.safetensors"],
                               ("sd/original/more", ""): ["loose.safetensors"]}


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    write(tmp_path, "unet/one.safetensors", "unet/two.safetensors", "unet/other.safetensors")
    index = tmp_path / "unet" / f"{WHOLE}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    assert found(tmp_path) == {("unet", ""): ["one.safetensors", "two.safetensors"]}
    index.write_text("[")
    with pytest.raises(ValueError, match=f"{WHOLE}.index.json is malformed"):
        found(tmp_path)


@pytest.mark.parametrize("shut", ["lost+found", "models--a--b/snapshots"])
def test_a_folder_that_cannot_be_read_hides_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shut: str
) -> None:
    write(tmp_path, f"{shut}/some.file", "gpt2/model.safetensors")
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == tmp_path / shut:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    save_file({"x": torch.ones(2)}, tmp_path / "gpt2" / "model.safetensors")
    found = {model.name: model.problem for model in SafetensorsStore(tmp_path).models()}
    assert found.pop("gpt2") == ""
    (problem,) = found.values()
    assert "Permission denied" in problem or "cannot be read" in problem


def test_no_file_is_digested_again_and_again_because_the_clock_was_set_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "one.safetensors")
    digested: list[int] = []
    monkeypatch.setattr(store, "time_ns", lambda: time_ns() - 86_400 * 10**9)
    monkeypatch.setattr(store, "sha256_of", lambda descriptor: digested.append(descriptor) or sha256_of(descriptor))
    kept = SafetensorsStore(tmp_path)
    for _ in range(5):
        assert not kept.models()[0].problem
    assert len(digested) == 1


def test_parts_in_the_cache_of_a_hub_have_the_revision_of_their_snapshot(tmp_path: Path) -> None:
    write(tmp_path, f"models--owner--sd/snapshots/abc/unet/{WHOLE}", "models--gpt2/snapshots/def/model.safetensors",
          "models--owner--sd/snapshots/abc/scheduler/config.json")
    assert found(tmp_path) == {("owner/sd/unet", "abc"): [WHOLE], ("gpt2", "def"): ["model.safetensors"]}


def test_variants_are_models_of_their_own_and_need_no_other_weights(tmp_path: Path) -> None:
    half, parts = "model.fp16.safetensors", [f"model.ema-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write(tmp_path, "both/model.safetensors", f"both/{half}", f"alone/{half}", "alone/pytorch_model.bin",
          *(f"both/{part}" for part in parts), f"models--gpt2/snapshots/abc/{half}")
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    (tmp_path / "both" / "model.safetensors.index.ema.json").write_text(json.dumps(index))
    assert found(tmp_path) == {
        ("both", ""): ["model.safetensors"], ("both", "", "fp16"): [half], ("both", "", "ema"): parts,
        ("alone", "", "fp16"): [half], ("gpt2", "abc", "fp16"): [half]}


def test_an_item_that_cannot_be_looked_at_hides_no_other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "gpt2" / "model.safetensors")
    (tmp_path / "itself.safetensors").symlink_to("itself.safetensors")
    (tmp_path / "to-nothing.safetensors").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.safetensors")
    write(tmp_path, "shut.safetensors", "odd.safetensors", "below/model.safetensors")
    os.close(os.open(os.fsencode(tmp_path) + b"/no-text-\xff.safetensors", os.O_CREAT))
    is_dir, resolved = Path.is_dir, os.path.realpath

    def looked_at(path: Path) -> bool:
        if path.name in ("shut.safetensors", "below"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    def led(path: Path, *, strict: bool) -> str:
        if path.name == "odd.safetensors":
            raise ZeroDivisionError
        return resolved(path, strict=strict)

    monkeypatch.setattr(Path, "is_dir", looked_at)
    monkeypatch.setattr(os.path, "realpath", led)
    store = SafetensorsStore(tmp_path)
    for _ in range(2):
        models = store.models()
        msgspec.msgpack.encode(models)
        assert {model.name for model in models if not model.problem} == {"gpt2"}
        problems = {model.name: model.problem for model in models if model.problem}
        assert set(problems) == {"itself", "to-nothing", "pipe", "shut.safetensors", "odd", "below", "no-text-\\udcff"}
        assert "levels of symbolic links" in problems["itself"]
        assert "UTF-8" in problems["no-text-\\udcff"]
