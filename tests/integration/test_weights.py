"""Weights go to the device without a second copy in the client's memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clients import weights
from support.processes.warm import run_python
from torch import nn

import djinn

DEVICE = torch.device("remote_accelerator:0")
LAYERS = 48
SIZE_MB = LAYERS * weights.LAYER_MB
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")


# What a connection has not taken yet may be copied, up to 32 MiB; a second copy of the weights would be all of them.
MOST = 0.3 * SIZE_MB


def run(address: str, move: str, path: Path | str = "") -> dict[str, Any]:
    program = f"from {weights.__name__} import main; main()"
    done = run_python(program, address, move, str(LAYERS), str(path), has_djinn=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
def test_a_model_that_is_moved_is_let_go_as_it_goes(server: Any) -> None:
    found = run(server.address, "to_device")
    assert found["peak"] < MOST
    assert found["after"] < -SIZE_MB + MOST
    assert found["extra"][len(found["extra"]) // 2] < -0.5 * SIZE_MB + MOST
    assert found["stats"]["bytes_sent"] > SIZE_MB * 2**20


@linux
def test_a_model_that_is_made_there_moves_nothing(server: Any) -> None:
    found = run(server.address, "construct")
    assert found["extra"] == ["remote_accelerator"]
    assert found["peak"] < 0.1 * SIZE_MB
    assert found["stats"]["bytes_sent"] < 20_000


@linux
@pytest.mark.parametrize("move", ["load_file", "safe_open"])
def test_a_file_streams_into_a_model(server: Any, tmp_path: Path, move: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file(weights.build(LAYERS).state_dict(), path)
    found = run(server.address, move, path)
    # The file itself is mapped, and counts once it has been read; nothing else does.
    assert found["peak"] < SIZE_MB + MOST
    assert found["anonymous"] < MOST
    assert found["stats"]["bytes_sent"] > SIZE_MB * 2**20


@pytest.fixture
def session(server: Any) -> Any:
    djinn.init(server=server.address)
    yield server
    djinn.init()


def test_what_is_loaded_is_what_was_saved(session: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 3))
    path = tmp_path / "model.safetensors"
    safetensors.save_file(model.state_dict(), path)
    with DEVICE:
        remote = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 3))
    remote.load_state_dict(safetensors.load_file(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(remote.state_dict()[name].cpu(), tensor), name


def test_loading_leaves_nothing_but_the_weights_at_the_executor(session: Any) -> None:
    model = nn.Linear(256, 256)
    remote = nn.Linear(256, 256, device=DEVICE)
    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    state = model.state_dict()
    remote.load_state_dict(state)
    djinn.synchronize()
    assert djinn.stats()["live_handles"] == before
    assert torch.equal(remote.weight.cpu(), state["weight"])


def test_safetensors_loads_onto_the_device_if_it_is_named(session: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"x": torch.ones(2)}, path)
    loaded = safetensors.load_file(path, device=str(DEVICE))["x"]
    assert loaded.device == DEVICE
    assert torch.equal(loaded.cpu(), torch.ones(2))
    with DEVICE:
        assert safetensors.load_file(path)["x"].device.type == "cpu"


MODULES = {
    "linear": lambda: nn.Linear(64, 32),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "embedding": lambda: nn.Embedding(50, 16, padding_idx=0),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "lstm": lambda: nn.LSTM(8, 16, num_layers=2),
    "norm": lambda: nn.LayerNorm(16),
    "transformer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "several": lambda: nn.Sequential(nn.Embedding(50, 16), nn.Conv1d(3, 8, 3), nn.Bilinear(4, 5, 6), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("make", list(MODULES.values()), ids=list(MODULES))
def test_a_model_that_is_made_there_begins_with_eagers_values(session: Any, make: Any) -> None:
    torch.manual_seed(7)
    expected = make().state_dict()
    torch.manual_seed(7)
    with DEVICE:
        made = make()
    assert {parameter.device for parameter in made.parameters()} == {DEVICE}
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name]), name
