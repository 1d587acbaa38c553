"""Which executor is used for a device, and what is said where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from djinn.errors import ConfigurationError, PluginError
from djinn.plugins import Plugins, PluginSelection
from djinn.settings import Config
from djinn_plugins.cli.doctor import _executor, _executor_devices
from djinn_plugins.cli.listing import rows_of
from djinn_plugins.executor.cpu.executor import CpuExecutor, CpuExecutorFactory
from djinn_plugins.executor.cuda.executor import CudaExecutorFactory

NAMES = ("djinn-executor-cpu", "djinn-executor-cuda")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there are CUDA devices, as many as the last number says."""
    counts = [2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counts[-1])
    return counts


def loaded(selection: str = "") -> Plugins:
    return Plugins.load(PluginSelection.parse(selection), names=NAMES)


@pytest.mark.parametrize(("devices", "device", "name"), [
    (2, "", "cuda"), (2, "cpu", "cpu"), (2, "cuda:1", "cuda"), (2, "cuda", "cuda"),
    (0, "", "cpu"), (0, "cpu", "cpu"), (0, "cuda:0", "cuda"), (0, "cdua:0", "cpu"),
])
def test_the_device_decides(counted: list[int], devices: int, device: str, name: str) -> None:
    counted.append(devices)
    assert loaded().find_executor(device).name == name


@pytest.mark.parametrize(("selection", "name"), [
    ("executor=cpu", "cpu"), ("executor=cuda", "cuda"),
    ("-djinn-executor-cpu", "cuda"), ("-djinn-executor-cuda", "cpu"),
])
@pytest.mark.parametrize("device", ["", "cpu", "cuda:0"])
def test_a_choice_counts_more_and_each_can_be_left_out(
    counted: list[int], selection: str, name: str, device: str,
) -> None:
    for devices in (0, 1):
        counted.append(devices)
        assert loaded(selection).find_executor(device).name == name


def test_another_executor_is_used_only_if_it_is_chosen_or_alone(counted: list[int]) -> None:
    other = SimpleNamespace(name="other", devices=lambda: ["other:0"], open=lambda device: CpuExecutor())

    def with_other(selection: str) -> Plugins:
        plugins = loaded(selection)
        entry = loaded().find_executor("cpu")
        plugins._registered["executor"].append(type(entry)("executor", "other", "acme", "acme 1", other))
        return plugins

    assert with_other("").find_executor("").name == "cuda"
    assert with_other("").find_executor("other:0").name == "other"
    assert with_other("executor=other").find_executor("cuda:0").name == "other"
    assert with_other("-djinn-executor-cpu,-djinn-executor-cuda").find_executor("").name == "other"
    assert with_other("-djinn-executor-cuda").find_executor("cuda:0").name == "cpu"
    with pytest.raises(PluginError, match="There is no executor"):
        loaded("-djinn-executor-cpu,-djinn-executor-cuda").find_executor("")


def test_nobody_asks_for_cuda_before_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    plugins = loaded()
    plugins.find_executor("cpu").value.open("cpu").close()
    assert plugins.find_executor("cuda:0").name == "cuda"


def test_an_executor_says_which_device_it_lacks_and_what_to_do(counted: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"cpu has no device 'cuda:0' here; it has cpu\..*djinn-executor-cuda"):
        CpuExecutorFactory().open("cuda:0")
    with pytest.raises(ConfigurationError, match=r"cuda has no device 'cuda:7' here; it has cuda:0, cuda:1\."):
        CudaExecutorFactory().open("cuda:7")
    with pytest.raises(ConfigurationError, match=r"cuda has no device 'cpu' here.*djinn-executor-cpu"):
        CudaExecutorFactory().open("cpu")
    with pytest.raises(ConfigurationError, match=r"has no device 'mps' here.*djinn-executor-mps"):
        loaded().find_executor("mps").value.open("mps")


def test_the_doctor_lists_devices_and_what_hides_or_shares_them(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert _executor_devices(loaded()) == "cpu (cpu), cuda:0 (cuda), cuda:1 (cuda)"
    for name in names:
        monkeypatch.setenv(name, "x")
    assert _executor_devices(loaded()).endswith("; CUDA_VISIBLE_DEVICES='x'; CUDA_MPS_PIPE_DIRECTORY='x'")


@pytest.mark.parametrize(("built", "visible", "reason"), [
    (None, None, "is built without CUDA"), ("13.0", "", "CUDA_VISIBLE_DEVICES= hides"), ("13.0", None, "nvidia-smi")])
def test_without_a_cuda_device_it_says_why(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, built: str | None, visible: str | None, reason: str,
) -> None:
    counted.append(0)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigurationError, match=f"cuda finds no device.*{reason}.*use the device cpu"):
        CudaExecutorFactory().open("")
    with pytest.raises(ConfigurationError, match="cuda finds no device 'cuda:0'"):
        CudaExecutorFactory().open("cuda:0")


def test_the_list_shows_which_is_used_and_why_another_is_not(counted: list[int]) -> None:
    def rows(selection: str = "") -> dict[str, tuple[bool, str, str]]:
        return {row.name: (row.active, row.replaced, row.note) for row in rows_of(loaded(selection))}

    assert rows() == {"cpu": (False, "", ""), "cuda": (True, "", "")}
    assert rows("executor=cpu") == {"cpu": (True, "djinn-executor-cuda", ""), "cuda": (False, "", "")}
    counted.append(0)
    assert rows()["cpu"] == (True, "", "")
    active, _, note = rows()["cuda"]
    assert not active
    assert "finds no device" in note


def test_the_doctor_says_which_is_used_and_why(counted: list[int]) -> None:
    assert "cuda (djinn-executor-cuda" in _executor(loaded(), Config())
    assert _executor(loaded(), Config(device="cpu")).endswith(": for the device cpu")
    assert _executor(loaded("executor=cpu"), Config()).endswith(": chosen in the configuration")
    counted.append(0)
    said = _executor(loaded(), Config())
    assert said.startswith("cpu (djinn-executor-cpu")
    assert "the default here; The executor cuda finds no device" in said
    with pytest.raises(ConfigurationError, match="cuda finds no device"):
        _executor(loaded("executor=cuda"), Config())
    # A client of a server opens no executor itself.
    _executor(loaded("executor=cuda"), Config(server="tcp://gpu:1"))
