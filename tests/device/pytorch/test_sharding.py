"""Meshes, sharded and replicated modules: two processes, each with a session, compare the device with the CPU."""

from __future__ import annotations

import os
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.processes.warm import run_djinn, run_python

from djinn_plugins.run.accelerator.libraries import replacements
from djinn_plugins.run.replacing import replaced
from djinn_plugins.run.report import RunReport

PROGRAM = textwrap.dedent("""
    import sys, torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    if sys.argv[2] != "cuda":
        import djinn

    rank, kind, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)
    sample = torch.arange(32.0).reshape(8, 4) / 10

    def meshes(kind):
        line = init_device_mesh(kind, (2,))
        square = init_device_mesh(kind, (2, 1), mesh_dim_names=("data", "model"))
        of_group = DeviceMesh.from_group(dist.group.WORLD, kind)
        rows = distribute_tensor(sample, line, [Shard(0)])
        parts = DTensor.from_local((sample + rank).to(kind), of_group, [Partial()])
        return [rows.to_local(), rows.redistribute(line, [Shard(1)]).to_local(), rows @ rows.t(), parts,
                distribute_tensor(sample, square, [Shard(0), Shard(1)]) * 2,
                distribute_tensor(sample, square["data"], [Replicate()]).sum()]

    def collectives(kind):
        here = (torch.arange(4.0) + 10 * rank).to(kind)
        gathered, scattered, swapped = torch.zeros(8, device=kind), torch.zeros(2, device=kind), here.clone()
        dist.all_gather_into_tensor(gathered, here)
        dist.reduce_scatter_tensor(scattered, here, async_op=True).wait()
        dist.all_to_all_single(swapped, here)
        objects = [None, None]
        dist.all_gather_object(objects, here)
        dist.barrier(device_ids=[rank])
        return [gathered, scattered, swapped, *objects]

    def trained(kind, change, accumulated=1):
        torch.manual_seed(0)
        model = change(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(kind))
        places = {parameter.device.type for parameter in model.parameters()}
        assert places == {torch.ones(1, device=kind).device.type}, places
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
        for _ in range(2):
            for index in range(accumulated):
                if accumulated > 1:
                    model.set_requires_gradient_sync(index == accumulated - 1)
                losses.append(model((sample + rank).to(kind)).float().square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *model.parameters()]

    def shard(model, **options):
        # Without a mesh, a module on the device stays there; one on the CPU would move to an accelerator.
        is_local = next(model.parameters()).device.type == "cpu"
        return fully_shard(model, **options, **({"mesh": init_device_mesh("cpu", (2,))} if is_local else {}))

    def layers(model, **options):
        shard(model[0], **options)
        return shard(model, **options)

    def tensor_parallel(model):
        mesh = init_device_mesh(model[0].weight.device.type, (1, 2), mesh_dim_names=("data", "model"))
        split = parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(split, mesh=mesh["data"])

    cases = {
        "meshes": meshes, "collectives": collectives,
        "fully_shard": lambda kind: trained(kind, layers),
        "accumulated": lambda kind: trained(kind, lambda model: layers(model, reshard_after_forward=False), 2),
        "mixed": lambda kind: trained(kind, lambda model: shard(
            model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))),
        "tensor_parallel": lambda kind: trained(kind, tensor_parallel),
        "unused": lambda kind: trained(kind, lambda model: nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=True)),
        "static": lambda kind: trained(kind, lambda model: nn.parallel.DistributedDataParallel(
            model, static_graph=True)),
    }
    for name, case in cases.items():
        outcomes = []
        for place in ("cpu", kind):
            made = [item.full_tensor() if isinstance(item, DTensor) else item for item in case(place)]
            outcomes.append([item.tolist() for item in made])
        print(name, outcomes[0] == outcomes[1], *([] if outcomes[0] == outcomes[1] else outcomes))
    print("backend", dist.get_default_backend_for_device(kind))
    dist.destroy_process_group()
""")
CASES = ("meshes", "collectives", "fully_shard", "accumulated", "mixed", "tensor_parallel", "unused", "static")


@pytest.fixture(scope="module", params=["remote_accelerator", "cuda"])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What two processes print, by the device's own name without a run mode, or as CUDA."""
    folder, server = tmp_path_factory.mktemp("sharding"), os.environ["DJINN_SERVER"]
    (folder / "script.py").write_text(PROGRAM)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(partial(_run, folder, server, request.param), "01"))
    for one in done:
        assert one.returncode == 0, one.stderr
    return [one.stdout.splitlines() for one in done]


def _run(folder: Path, server: str, kind: str, rank: str) -> object:
    arguments = (rank, kind, str(folder / "store"))
    if kind == "cuda":
        return run_djinn("run", "--server", server, "--as", "cuda", "script.py", *arguments, folder=folder,
                         GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    return run_python(PROGRAM, *arguments, folder=folder, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
                      DJINN_SERVER=server)


@pytest.mark.parametrize("name", CASES)
def test_the_device_computes_what_the_cpu_does(printed: list[list[str]], name: str) -> None:
    for lines in printed:
        assert f"{name} True" in lines, next((line for line in lines if line.startswith(name)), lines)


def test_the_device_has_a_default_backend(printed: list[list[str]]) -> None:
    assert all("backend gloo" in lines for lines in printed)


@pytest.mark.parametrize(("is_sharded", "processes", "chosen"), [
    ("false", "2", ("gloo", "MULTI_CPU")), ("true", "2", ("gloo", "MULTI_GPU")), ("false", "1", (None, "NO"))])
def test_processes_that_a_launcher_starts_train_together(monkeypatch: pytest.MonkeyPatch, is_sharded: str,
                                                         processes: str, chosen: tuple[str | None, str]) -> None:
    state = pytest.importorskip("accelerate.state")
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": processes, "ACCELERATE_USE_FSDP": is_sharded}.items():
        monkeypatch.setenv(name, value)
    with replaced(replacements(torch.device("remote_accelerator:0")), RunReport()):
        backend, kind = state.PartialState._prepare_backend(None)
    assert (backend, kind.name) == chosen
