"""A cache that grows on a server is written into spare room, which nobody but the clock can tell."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import djinn
from djinn.plugins import Plugins
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.torch.growing import GrowingValues
from djinn_plugins.server.server import Server

DEVICE = "remote_accelerator:0"
TOKENS = 24


class KeepingExecutor(CpuExecutor):
    """Keeps the spare room of its sessions, to count how often something was written there."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[GrowingValues] = []

    def spare_room(self) -> GrowingValues:
        self.rooms.append(super().spare_room())
        return self.rooms[-1]

    @property
    def joined(self) -> int:
        return sum(room.joined for room in self.rooms)

    @property
    def moved(self) -> int:
        return sum(room.moved for room in self.rooms)


@pytest.fixture
def executor() -> Iterator[KeepingExecutor]:
    """An executor that is served with a guard, in a session of its own."""
    plugins, executor = Plugins.load(), KeepingExecutor()
    watch = partial(plugins.choose("guard", "core").watch, Bounds("cpu", 2**30), plugins.choose("shapes", "meta"))
    listener = plugins.transport_for("tcp").listen("tcp://127.0.0.1:0", ListenOptions())
    with Server(listener, executor, admit=lambda channel, hello: None, watch=watch) as server:
        djinn.init(server=server.address)
        yield executor
        djinn.shutdown()


def decoded(device: str, tokens: int = TOKENS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Append to a cache token by token, and attend to it; return all caches and all results."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 4, 80, 64, generator=generator).to(device)
    caches, results = [cache], []
    with torch.no_grad():
        for _ in range(tokens):
            query, new = (torch.randn(2, 4, 1, 64, generator=generator).to(device) for _ in range(2))
            cache = torch.cat([cache, new], dim=-2)
            result = F.scaled_dot_product_attention(query, cache, cache)
            results.append(result.cpu())
            caches.append(cache)
    return caches, results


def test_old_caches_and_results_are_those_of_local_pytorch(executor: KeepingExecutor) -> None:
    caches, results = decoded(DEVICE)
    assert executor.joined >= TOKENS - 2
    wanted_caches, wanted = decoded("cpu")
    for mine, theirs in zip([*results, *caches], [*wanted, *wanted_caches], strict=True):
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine.cpu(), theirs)
        assert mine.cpu().stride() == theirs.stride()


def test_other_operations_find_caches_as_local_pytorch_lays_them_out(executor: KeepingExecutor) -> None:
    for device in (DEVICE, "cpu"):
        caches, _ = decoded(device)
        with torch.no_grad():
            newest, older = caches[-1], caches[-3]
            made = [newest.view(-1)[::7], older.as_strided((3, 5), (64, 1), 11), newest.transpose(1, 2).reshape(-1)]
            older.mul_(2)
            branch = torch.cat([older, newest[:, :, :2]], dim=2)
            made += [branch, torch.cat([caches[-2], older[:, :, :5]], 2), older, newest, caches[-2]]
        if device == DEVICE:
            found = [value.cpu() for value in made]
            assert executor.joined >= TOKENS - 2
    for mine, theirs in zip(found, made, strict=True):
        assert torch.equal(mine, theirs)


def test_calls_that_raise_say_what_local_pytorch_says(executor: KeepingExecutor) -> None:
    caches, _ = decoded(DEVICE)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 2"):
        torch.cat([caches[-1], torch.zeros(2, 3, 1, 64, device=DEVICE)], 2).cpu()
    assert executor.joined >= TOKENS - 2
    assert torch.equal(caches[-1].cpu(), decoded("cpu")[0][-1])


def test_what_was_freed_gives_its_room_back(executor: KeepingExecutor) -> None:
    caches, _ = decoded(DEVICE, 4)
    joined, moved = executor.joined, executor.moved
    query = torch.ones(2, 4, 1, 64, device=DEVICE)
    for number in range(3):
        branch = torch.cat([caches[-1], query * number], 2)
        found = F.scaled_dot_product_attention(query, branch, branch).cpu()
        home = branch.clone().cpu()
        assert torch.equal(found, F.scaled_dot_product_attention(query.cpu(), home, home))
        del branch
        # Values are freed with the next batch; one that only fetches a value may have been computed ahead.
        djinn.synchronize()
    assert executor.joined == joined + 3
    assert executor.moved == moved


def test_branches_that_are_kept_have_memory_of_their_own(executor: KeepingExecutor) -> None:
    caches, _ = decoded(DEVICE, 4)
    moved = executor.moved
    news = [torch.full((2, 4, 1, 64), float(number), device=DEVICE) for number in range(3)]
    query = torch.ones(2, 4, 1, 64, device=DEVICE)
    branches = [torch.cat([caches[-1], new], 2) for new in news]
    for branch in branches:
        F.scaled_dot_product_attention(query, branch, branch).cpu()
    assert executor.moved == moved + 2
    for number, branch in enumerate(branches):
        assert torch.equal(branch[:, :, -1:].cpu(), torch.full((2, 4, 1, 64), float(number)))
