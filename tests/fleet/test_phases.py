"""With ``placement="phases"``, prompts are read on another server where that takes less time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.generate_modes import grouped_query_llama
from support.servers.fleet import fleet_of

import djinn
from djinn.errors import OutOfMemoryError
from djinn.ir.tape import Node
from djinn.session.session import Session
from djinn_plugins.fleet.loads import FleetLoads
from djinn_plugins.fleet.placement import FleetMember
from djinn_plugins.schedule.schedule import DeviceProfile, LinkProfile

DEVICE = "remote_accelerator:0"
PROMPT = (torch.arange(80) * 7 % 90 + 3).reshape(2, 40)
BUSY = 0.99
WAYS: dict[str, dict[str, Any]] = {
    "growing": {"do_sample": False}, "fixed": {"do_sample": False, "cache_implementation": "static"},
    "sampled": {"do_sample": True, "top_k": 20},
}


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        made: torch.Tensor = model.generate(prompt, max_new_tokens=6, **{"do_sample": False, **options})
    return made.cpu()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets servers be as busy as this, as far as sessions know."""

    def load(*loads: float) -> None:
        monkeypatch.setattr(FleetLoads, "of", lambda self, executor: loads[executor])

    return load


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[Session], list[tuple[int, int]]]:
    """Watches where a session attends: number of positions, and executor."""

    def watch(session: Session) -> list[tuple[int, int]]:
        fleet, seen = fleet_of(session), list[tuple[int, int]]()
        put = fleet._put

        def noted(node: Node, executor: int) -> None:
            if "scaled_dot_product" in node.signature.template.operator:
                seen.append((node.signature.operands[0].size[-2], executor))
            put(node, executor)

        monkeypatch.setattr(fleet, "_put", noted)
        return seen

    return watch


@pytest.fixture
def apart() -> Iterator[Session]:
    """Two executors in this process."""
    yield djinn.init(servers=["local://"] * 2, placement="phases", recovery="none")
    djinn.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_eager_though_one_server_reads_and_the_other_writes(
    server: Any, second_server: Any, ran: Any, loaded: Any, way: str,
) -> None:
    model = grouped_query_llama()
    wanted = generated(model, PROMPT, **WAYS[way])
    session = djinn.init(servers=[server.address, second_server.address], placement="phases", recovery="none")
    model.to(DEVICE)
    for loads in ((0.0, 0.0), (BUSY, 0.0), (BUSY, 0.0)):
        loaded(*loads)
        seen = ran(session)
        djinn.reset_stats()
        assert torch.equal(generated(model, PROMPT.to(DEVICE), **WAYS[way]), wanted)
        reader = int(loads[0] > loads[1])
        assert {(rows == PROMPT.shape[1], executor) for rows, executor in seen} == {(True, reader), (False, 0)}
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    assert 0 < djinn.stats()["bytes_transferred"] < weight_bytes, "the weights are there already"
    djinn.shutdown()


def test_nothing_moves_where_that_would_take_longer(apart: Session, ran: Any, loaded: Any) -> None:
    model = grouped_query_llama().to(DEVICE)
    prompt = PROMPT.to(DEVICE)
    usual, slow = LinkProfile(), LinkProfile(bytes_per_s=100.0)
    for loads, there, back in (((0.0, 0.0), usual, usual), ((0.5, 0.9), usual, usual), ((BUSY, 0.0), slow, usual),
                               ((BUSY, 0.0), usual, slow)):
        fleet_of(apart).learn(0, DeviceProfile(), LinkProfile(), {1: there})
        fleet_of(apart).learn(1, DeviceProfile(), LinkProfile(), {0: back})
        loaded(*loads)
        seen = ran(apart)
        djinn.reset_stats()
        generated(model, prompt)
        assert {executor for _, executor in seen} == {0}
        assert djinn.stats()["transfers"] == 0


def test_weights_are_sent_once_prompts_have_waited_for_as_long_as_that_takes(
    apart: Session, ran: Any, loaded: Any,
) -> None:
    model = grouped_query_llama().to(DEVICE)
    prompt = PROMPT.to(DEVICE)
    # The weights of one layer, 30 kB, take longer than a prompt would save, and what the prompt leaves takes less.
    fleet_of(apart).learn(0, DeviceProfile(), LinkProfile(), {1: LinkProfile(bytes_per_s=1e7)})
    loaded(0.9, 0.0)
    seen, readers = ran(apart), []
    for _ in range(8):
        seen.clear()
        generated(model, prompt)
        readers.append(max(executor for _, executor in seen))
    first = readers.index(1)
    assert first > 0
    assert readers == [0] * first + [1] * (len(readers) - first)


def test_stored_weights_are_loaded_by_both_servers_and_one_that_dies_is_missed_by_nobody(
    start_server: Callable[..., Any], tmp_path: Path, loaded: Any,
) -> None:
    local = grouped_query_llama()
    local.save_pretrained(tmp_path / "llama")
    wanted = generated(local, PROMPT)
    servers = [start_server("--models", str(tmp_path)) for _ in range(2)]
    djinn.init(servers=[running.address for running in servers], placement="phases", failover_timeout_s=0.3)
    with torch.device("meta"):
        model = type(local)(local.config).eval()
    model.load_state_dict(djinn.models.load("llama"), assign=True)
    model.tie_weights()
    loaded(BUSY, 0.0)
    djinn.reset_stats()
    model.model.rotary_emb.inv_freq = local.model.rotary_emb.inv_freq.to(DEVICE)
    assert torch.equal(generated(model, PROMPT.to(DEVICE)), wanted)
    counts = djinn.stats()
    assert 0 < counts["bytes_transferred"] < sum(weight.nbytes for weight in local.parameters()) / 2
    servers[1].kill()
    assert torch.equal(generated(model, PROMPT.to(DEVICE)), wanted)
    assert djinn.stats()["recoveries"] == 1
    djinn.shutdown()


def test_a_first_server_with_too_little_memory_says_so(apart: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetMember, "memory_bytes", 2**20)
    with pytest.raises(OutOfMemoryError, match="first server") as full:
        torch.zeros(2**19).to(DEVICE)
    assert "automatic" in str(full.value)
    assert torch.ones(3, device=DEVICE).sum().item() == 3
