"""A guarded server on a GPU: results, lost devices and memory. Without a GPU, only the results, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpu import programs
from support.processes.warm import run_script
from support.servers.serving import Serving

import djinn
from djinn.errors import DeviceLostError
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session import runtime
from djinn_plugins.common.device_report import device_of

D = "remote_accelerator:0"
GIB = 2**30
LOST_S = 10.0
"""Time in which another worker has to serve after a device was lost."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
Wanted = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=needs_gpu),
                                        pytest.param("cuda:0 with overlap", marks=needs_gpu)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Wanted]]:
    """An address, and what the programs give on the device itself."""
    folder = tmp_path_factory.mktemp("served")
    device, _, overlaps = request.param.partition(" ")
    file = folder / "wanted.pt"
    done = run_script(Path(programs.__file__), device, str(file), timeout_s=300)
    assert done.returncode == 0, done.stderr
    with Serving(folder / "log", "--device", device, DJINN_CUDA_OVERLAP="1" if overlaps else "0") as server:
        yield server.address, torch.load(file)


@pytest.fixture
def session(served: tuple[str, Wanted]) -> Iterator[Wanted]:
    address, wanted = served
    djinn.init(server=address)
    yield wanted
    djinn.shutdown()


@pytest.mark.parametrize("name", programs.EXACT)
def test_a_program_gives_the_bits_of_local_pytorch(session: Wanted, name: str) -> None:
    # On a CPU, these layers are decomposed where gradients are needed.
    is_near = name in ("GRU", "RNN") and device_of(unwrapped(runtime.current().backend).welcome).kind == "cpu"
    allowed = programs.CLOSE if is_near else 0
    assert programs.distance(programs.EXACT[name](D).detach().cpu(), session[name]) <= allowed


@pytest.mark.parametrize("name", programs.NEAR)
def test_a_program_comes_close_to_local_pytorch(session: Wanted, name: str) -> None:
    assert programs.distance(programs.NEAR[name](D).detach().cpu(), session[name]) <= programs.CLOSE


@pytest.fixture
def gpu_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path / "log", "--device", "cuda:0") as server:
        yield server


@needs_gpu
def test_a_wrong_index_ends_the_worker_and_another_one_serves_soon(gpu_server: Serving) -> None:
    djinn.init(server=gpu_server.address)
    table = torch.zeros(10, 4, device=D)
    with pytest.raises((RuntimeError, DeviceLostError)):
        F.embedding(torch.tensor([99], device=D), table).sum().item()
    with pytest.raises(DeviceLostError):
        table.sum().item()
    begun = time.monotonic()
    djinn.init(server=gpu_server.address)
    assert torch.ones(3, device=D).sum().item() == 3
    assert time.monotonic() - begun < LOST_S
    djinn.shutdown()


@needs_gpu
def test_too_much_memory_is_an_error_and_the_session_goes_on(gpu_server: Serving) -> None:
    djinn.init(server=gpu_server.address)
    with pytest.raises(RuntimeError):
        torch.empty(2**40, device=D).fill_(0).sum().item()
    assert torch.ones(3, device=D).sum().item() == 3
    djinn.shutdown()


@needs_gpu
def test_memory_is_given_back_when_a_session_ends(gpu_server: Serving) -> None:
    def free_bytes() -> int:
        djinn.init(server=gpu_server.address)
        found = device_of(unwrapped(runtime.current().backend).welcome).free_bytes
        djinn.shutdown()
        return found

    before = free_bytes()
    djinn.init(server=gpu_server.address)
    torch.zeros(GIB // 4, device=D).sum().item()
    djinn.shutdown()
    until = time.monotonic() + 20
    while free_bytes() < before - GIB // 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert free_bytes() >= before - GIB // 2
