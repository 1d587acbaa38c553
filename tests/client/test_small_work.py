"""With ``placement="cost"``, small work on small data of the client stays there: counted, over a guarded server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import djinn
from djinn_plugins.client.known_values import backend

DEVICE = "remote_accelerator:0"
MIB = 2**20


@pytest.fixture(autouse=True)
def _at_home(server: Any) -> Iterator[None]:
    djinn.init(server.address, placement="cost")
    yield
    djinn.shutdown()


def trips_of(action: Callable[[], Any]) -> tuple[int, Any]:
    djinn.synchronize()
    djinn.reset_stats()
    made = action()
    return djinn.stats()["round_trips"], made


def statistics(x: torch.Tensor) -> list[float]:
    apart = (x - x.mean()) / 3
    spread = apart * apart
    return [spread.sum().item(), spread.mean().sqrt().item(), float(x.abs().amax()), (x > 0.5).sum().item(),
            float(torch.relu(x - 1).sum()), x.half().to(torch.float64).sum(0)[1].item()]


def test_small_work_on_small_data_costs_no_trip_and_gives_the_same_bits() -> None:
    here = torch.randn(60, 50)
    there = here.to(DEVICE)
    assert trips_of(lambda: statistics(there)) == (0, statistics(here))
    djinn.init(djinn.ensure_initialized().config.server)
    there = here.to(DEVICE)
    trips, found = trips_of(lambda: statistics(there))
    assert found == statistics(here)
    assert trips == len(found)


@pytest.mark.parametrize("work", [
    lambda x: x.sum(), lambda x: x.argmax(), lambda x: x.amax(),
], ids=["sum", "argmax", "extreme"])
def test_what_reduces_a_large_value_is_done_there_and_brings_little_home(work: Callable[[torch.Tensor], Any]) -> None:
    here = torch.randn(MIB // 4 + 1)
    there = here.to(DEVICE)
    trips, found = trips_of(lambda: work(there).item())
    assert trips == 1
    assert found == pytest.approx(work(here).item(), rel=1e-4)
    assert djinn.stats()["bytes_received"] < 1000


@pytest.mark.parametrize("work", [
    lambda x: x @ x.t(), lambda x: x.exp(), lambda x: x.argmax(), torch.rand_like,
    lambda x: x.repeat(20, 1).sum(),
], ids=["products", "exponentials", "positions", "random", "pieces of threads"])
def test_what_processors_may_round_differently_is_asked_for(work: Callable[[torch.Tensor], Any]) -> None:
    there = torch.randn(50, 50).to(DEVICE)
    assert trips_of(lambda: work(there).cpu())[0] == 1


def test_a_server_that_may_compute_otherwise_is_asked(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "computes_alike", lambda welcome: False)
    djinn.init(server.address, placement="cost")
    there = torch.ones(3).to(DEVICE)
    assert trips_of((there / 3).cpu)[0] == 1
    assert trips_of((torch.arange(3, device=DEVICE) + 1).tolist) == (0, [1, 2, 3])


def test_writes_are_seen() -> None:
    def rounds(device: str) -> list[float]:
        x = torch.arange(6.0).to(device)
        alias, made = x.view(2, 3), []
        for step in range(4):
            made += [x.sum().item(), (alias[1] / 3).sum().item()]
            alias[step % 2].mul_(0.3)
            made.append(float(x.mean()))
            x.data.add_(step)
        return made

    assert rounds(DEVICE) == rounds("cpu")


def test_zeros_do_not_decide_where_a_number_may_be_none() -> None:
    unknown = (torch.zeros(3).to(DEVICE) @ torch.zeros(3).to(DEVICE)) / 0
    assert (torch.zeros(()).to(DEVICE) * unknown).isnan().item()


def test_what_is_kept_is_bounded() -> None:
    kept = [torch.full((MIB // 4,), float(number)).to(DEVICE) for number in range(70)]
    djinn.synchronize()
    assert trips_of(kept[-1][0].item) == (0, 69)
    assert trips_of(kept[0][0].item) == (1, 0)
