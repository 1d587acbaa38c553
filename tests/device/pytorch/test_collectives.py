"""``torch.distributed``: two processes, each with a session, whose remote tensors take part in gloo's collectives."""

from __future__ import annotations

import json
import os
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn

PROGRAM = textwrap.dedent("""
    import json, sys, torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    here = torch.arange(2.0, device="cuda") + 10 * rank
    made = {}

    summed, other = here.clone(), here.clone()
    work = dist.all_reduce(summed, async_op=True)
    dist.broadcast(other, 1)
    work.wait()
    made["all_reduce"], made["broadcast"] = summed, other
    both = torch.zeros(4, device="cuda")
    dist.all_gather(list(both.chunk(2)), here)
    made["all_gather"] = both
    made["functional"] = functional.all_reduce(here, "sum", dist.group.WORLD)
    scattered = torch.zeros(2, device="cuda")
    dist.scatter(scattered, [here, here + 1] if rank == 0 else None, 0)
    made["scatter"] = scattered
    received, sent = torch.zeros(2, device="cuda"), here * 2
    works = [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]
    for work in works:
        work.wait()
    made["received"] = received

    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda(), device_ids=[0])
    model(here).sum().backward()
    made["parameters"], made["gradient"] = model.module.weight.detach(), model.module.weight.grad
    print(json.dumps({name: tensor.tolist() for name, tensor in made.items()}))
    try:
        dist.new_group(backend="nccl")
    except RuntimeError as error:
        print(error)
    dist.destroy_process_group()
""")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes print."""
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "script.py").write_text(PROGRAM)
    with ThreadPoolExecutor(2) as pool:
        arguments = ("run", "--server", os.environ["DJINN_SERVER"], "--as", "cuda", "script.py")
        run = partial(run_djinn, folder=folder, GLOO_SOCKET_IFNAME="lo")
        done = list(pool.map(lambda rank: run(*arguments, rank, str(folder / "store")), "01"))
    for one in done:
        assert one.returncode == 0, one.stderr
    return [one.stdout.splitlines() for one in done]


def test_remote_tensors_take_part_in_collectives(processes: list[Any]) -> None:
    first, second = (json.loads(lines[0]) for lines in processes)
    for name, wanted in {"all_reduce": [10, 12], "broadcast": [10, 11], "all_gather": [0, 1, 10, 11],
                         "functional": [10, 12], "gradient": [[5, 6]]}.items():
        assert first[name] == second[name] == wanted, name
    assert (first["scatter"], second["scatter"]) == ([0, 1], [1, 2])
    assert (first["received"], second["received"]) == ([20, 22], [0, 2])
    torch.manual_seed(0)
    assert first["parameters"] == second["parameters"] == torch.nn.Linear(2, 1).weight.tolist()


def test_nccl_is_refused_with_the_remedy(processes: list[Any]) -> None:
    for lines in processes:
        assert "'gloo'" in lines[1], lines
