"""Each of several executors is a device: what goes where is the user's to say."""

from __future__ import annotations

import pytest
import torch
from support.servers.fleet import fleet_of

import djinn
from djinn.session.session import Session

ZERO, ONE = "remote_accelerator:0", "remote_accelerator:1"


@pytest.mark.usefixtures("explicit")
def test_values_stay_on_their_device() -> None:
    x = torch.arange(6.0, device=ONE).reshape(2, 3)
    y = x @ x.T
    assert (x.device, y.device) == (torch.device(ONE), torch.device(ONE))
    assert torch.equal(y.cpu(), torch.arange(6.0).reshape(2, 3) @ torch.arange(6.0).reshape(2, 3).T)


def test_a_device_that_is_not_there_is_refused(explicit: Session) -> None:
    with pytest.raises(RuntimeError, match="there are 2 remote accelerators"):
        torch.zeros(2, device="remote_accelerator:2")
    assert torch.remote_accelerator.device_count() == 2


def test_devices_do_not_mix(explicit: Session) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, remote_accelerator:0 and remote_accelerator:1"):
        torch.ones(2, device=ZERO) + torch.ones(2, device=ONE)


def test_values_move_without_passing_through_the_client(explicit: Session) -> None:
    x = torch.randn(256, 256)
    there = x.to(ZERO)
    djinn.flush()
    djinn.reset_stats()
    here = (there * 2).to(ONE)
    back = here.to(ZERO) + there
    assert torch.equal(back.cpu(), x * 2 + x)
    assert djinn.stats()["transfers"] == 2
    assert djinn.stats()["bytes_transferred"] == 2 * 256 * 256 * 4


def test_a_copy_is_not_written_with_its_original(explicit: Session) -> None:
    x = torch.zeros(4, device=ZERO)
    y = x.to(ONE)
    x.add_(1)
    z = x.to(ONE)
    y.sub_(1)
    assert [t.cpu().tolist() for t in (x, y, z)] == [[1.0] * 4, [-1.0] * 4, [1.0] * 4]


def test_copying_into_a_tensor_of_another_device(explicit: Session) -> None:
    x, y = torch.arange(6.0, device=ZERO).reshape(2, 3), torch.zeros(3, 2, device=ONE)
    y.copy_(x.T)
    y[0].copy_(torch.full((2,), 9.0, device=ZERO))
    assert y.cpu().tolist() == [[9.0, 9.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_model_on_two_devices_trains_as_on_one(explicit: Session) -> None:
    def losses(first_device: str, second_device: str) -> list[float]:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        data, target = torch.randn(5, 8), torch.randn(5, 4)
        first.to(first_device), second.to(second_device)
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
        seen = []
        for _ in range(5):
            hidden = torch.relu(first(data.to(first_device))).to(second_device)
            loss = torch.nn.functional.mse_loss(second(hidden), target.to(second_device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert losses(ZERO, ONE) == losses("cpu", "cpu")


def test_each_device_has_its_own_random_numbers(explicit: Session) -> None:
    torch.manual_seed(3)
    one, other = torch.randn(4, device=ZERO), torch.randn(4, device=ONE)
    wanted = torch.randn(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(one.cpu(), wanted)
    assert torch.equal(other.cpu(), wanted)
    state = torch.remote_accelerator.get_rng_state(1)
    first = torch.randn(4, device=ONE).cpu()
    torch.remote_accelerator.set_rng_state(state, 1)
    assert torch.equal(torch.randn(4, device=ONE).cpu(), first)


def test_a_failure_is_told_once(explicit: Session) -> None:
    x = torch.zeros(3, 3, device=ZERO)
    bad = torch.linalg.inv(x).to(ONE) + 1
    with pytest.raises(torch.linalg.LinAlgError):
        bad.cpu()
    djinn.synchronize()
    assert (torch.ones(2, device=ONE) + 1).cpu().tolist() == [2.0, 2.0]


def test_nothing_is_left_behind(explicit: Session) -> None:
    x = torch.ones(1000, device=ZERO)
    for _ in range(20):
        x = (x.to(ONE) + 1).to(ZERO)
    assert x.cpu()[0] == 21
    del x
    djinn.synchronize()
    fleet = fleet_of(explicit)
    assert djinn.stats()["live_handles"] == 0
    assert len(fleet.where) == 0
    assert fleet.where.held_bytes == [0, 0]
