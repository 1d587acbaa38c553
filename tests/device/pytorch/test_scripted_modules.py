"""Modules of TorchScript on the device are read and written with their values, by every reader and writer in C++."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.jit.mobile import _load_for_lite_interpreter

import djinn
from djinn.record.tensor import LazyTensor

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in (
    "DeprecationWarning", "UserWarning", "torch.jit.TracerWarning")]
_X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class _Model(torch.nn.Module):
    """One of everything that holds tensors: parameters, buffers that share memory, attributes, lists, constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
        base = torch.arange(8.0).reshape(2, 4).t()
        self.register_buffer("whole", base)
        self.register_buffer("part", base[1:])
        self.attribute = torch.tensor([5.0, 6.0])
        self.several = [torch.tensor([0.5]), torch.tensor([0.25, 0.125])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) + self.part[0] * self.attribute + self.several[0] + self.several[1]


def _scripted(kind: str) -> Any:
    model: Any = _Model().eval()
    if kind == "traced":
        return torch.jit.trace(model, (_X,))
    model = torch.jit.script(model)
    return torch.jit.freeze(model) if kind == "frozen" else model


def _packaged(path: Path, location: Any) -> Any:
    return torch.package.PackageImporter(path).load_pickle("m", "m.pkl", map_location=location)


def _imported(path: Path, location: Any) -> Any:
    unit = torch._C.CompilationUnit()
    return torch.jit._recursive.wrap_cpp_module(
        torch._C.import_ir_module(unit, str(path), torch.device(location), {}, False))  # type: ignore[call-arg]  # the stub lacks one


_READERS: dict[str, Callable[[Path, Any], Any]] = {
    "path": lambda path, location: torch.jit.load(path, map_location=location),
    "buffer": lambda path, location: torch.jit.load(io.BytesIO(path.read_bytes()), map_location=location),
    "device": lambda path, location: torch.jit.load(path, map_location=torch.device(location)),
    "import_ir_module": _imported,
    "torch.load": lambda path, location: torch.load(path, map_location=location, weights_only=False),
    "package": _packaged,
}


@pytest.fixture(autouse=True)
def strict(served: None) -> Iterator[None]:
    """Lets no value that stayed here meet one on the device."""
    djinn.init(strict=True)
    yield
    djinn.shutdown()


@pytest.fixture
def _packages_hold_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.package.package_exporter, "_gate_torchscript_serialization", False)


@pytest.mark.usefixtures("_packages_hold_scripts")
@pytest.mark.parametrize("kind", ["scripted", "traced", "frozen"])
@pytest.mark.parametrize("reader", _READERS)
def test_a_module_that_is_read_onto_the_device_is_the_one_that_was_saved(
    tmp_path: Path, reader: str, kind: str
) -> None:
    module, path = _scripted(kind), tmp_path / "m"
    if reader == "package":
        with torch.package.PackageExporter(path) as exporter:
            exporter.save_pickle("m", "m.pkl", module)
    else:
        torch.jit.save(module, path)
    read = _READERS[reader](path, "remote_accelerator")
    state = module.state_dict()
    assert {name: (type(item), item.tolist()) for name, item in read.state_dict().items()} == {
        name: (LazyTensor, item.tolist()) for name, item in state.items()}
    assert [item.requires_grad for item in read.parameters()] == [item.requires_grad for item in module.parameters()]
    assert torch.equal(read(_X.to("remote_accelerator:0")).cpu(), module(_X))
    # And back: the writers are in C++, too.
    written = io.BytesIO()
    torch.jit.save(read, written)
    written.seek(0)
    assert torch.equal(torch.jit.load(written)(_X), module(_X))
    assert torch.equal(read(_X.to("remote_accelerator:0")).cpu(), module(_X)), "what was written is still there"
    if state:
        read.whole.zero_()
        assert not read.part.any(), "the buffers share memory"


def test_functions_and_the_flat_format_are_written_with_their_values() -> None:
    remote = torch.device("remote_accelerator", 0)
    held = torch.arange(3.0, device=remote)
    function = torch.jit.trace(lambda x: x * held, (torch.ones(3, device=remote),))
    written = io.BytesIO()
    torch.jit.save(function, written)
    written.seek(0)
    assert torch.jit.load(written)(torch.ones(3)).tolist() == [0, 1, 2]
    module = torch.jit.script(_Model().eval()).to(remote)
    written = io.BytesIO()
    torch.jit.save_jit_module_to_flatbuffer(module, written)
    written.seek(0)
    assert torch.equal(torch.jit.jit_module_from_flatbuffer(written)(_X), _scripted("scripted")(_X))


def test_pickles_in_packages_are_read_onto_the_device(tmp_path: Path) -> None:
    with torch.package.PackageExporter(tmp_path / "m") as exporter:
        exporter.save_pickle("m", "m.pkl", {"weight": torch.arange(6.0).reshape(2, 3).t()})
    read = _packaged(tmp_path / "m", "remote_accelerator:0")["weight"]
    assert type(read) is LazyTensor
    assert read.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_lite_interpreter_is_refused_where_it_reads(tmp_path: Path) -> None:
    torch.jit.script(_Model().eval())._save_for_lite_interpreter(str(tmp_path / "m"))
    with pytest.raises(djinn.errors.UnsupportedTensorError, match="lite interpreter"):
        _load_for_lite_interpreter(tmp_path / "m", map_location="remote_accelerator:0")
