"""Warnings that kernels give reach the user's ``warnings``, at the next wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import djinn
from djinn.wire.messages import MAX_WARNINGS, Warned
from djinn_plugins.common.kernel_warnings import KernelWarnings

REMOTE = "remote_accelerator:0"
CALLS: dict[str, Callable[[str], Any]] = {
    "std of one": lambda device: torch.std(torch.ones(1, device=device)),
    "byte mask": lambda device: torch.ones(3, device=device)[torch.tensor([1, 0, 1], dtype=torch.uint8, device=device)],
    "result resized": lambda device: torch.add(
        torch.ones(3, device=device), 1, out=torch.ones(2, device=device)),
}


@pytest.fixture(params=["in_process", "served"], autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    djinn.init(server=request.getfixturevalue("server").address if request.param == "served" else "")
    yield request.param
    djinn.shutdown()


def given(action: Callable[[], Any]) -> list[tuple[type[Warning], str]]:
    """The categories and first words of the warnings that an action gives."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kept = action()
        djinn.synchronize()
        del kept
    return [(warning.category, str(warning.message).partition(" (Triggered")[0]) for warning in seen]


@pytest.mark.parametrize("call", CALLS)
def test_they_are_those_of_eager(call: str) -> None:
    wanted = given(lambda: CALLS[call]("cpu"))
    assert wanted
    assert [warning for warning in given(lambda: CALLS[call](REMOTE)) if warning in wanted] == wanted[:1]
    # Again, as eager does.
    assert wanted[0] in given(lambda: CALLS[call](REMOTE))


def test_a_mask_of_bytes_warns_at_its_line() -> None:
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    for device in ("cpu", REMOTE):
        target, chosen, value = torch.zeros(3, device=device), mask.to(device), torch.ones(2, device=device)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            target[chosen] = value
            assert [str(warning.message).partition(",")[0] for warning in seen] == [
                "indexing with dtype torch.uint8 is now deprecated"]
        assert target.tolist() == [1, 0, 1]


def test_one_that_a_kernel_gives_twice_comes_twice() -> None:
    def choose(device: str) -> torch.Tensor:
        first, second = (torch.tensor(mask, dtype=torch.uint8, device=device) for mask in ([1, 0, 1, 1, 0], [1, 1, 1]))
        return torch.ones(5, 7, 3, device=device)[first, :, second]

    assert given(lambda: choose(REMOTE)) == given(lambda: choose("cpu")) != []
    assert len(given(lambda: choose(REMOTE))) == 2


def test_one_that_is_made_an_error_is_raised_at_the_wait_and_harms_nothing() -> None:
    ones = torch.ones(1, device=REMOTE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deviation = torch.std(ones)
        with pytest.raises(UserWarning, match="degrees of freedom"):
            djinn.synchronize()
    assert deviation.isnan().item()
    assert (ones + 1).item() == 2.0


def test_ignored_ones_are_ignored() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        assert torch.std(torch.ones(1, device=REMOTE)).isnan()
    assert not seen


@pytest.mark.parametrize("where", ["served"], indirect=True)
def test_one_of_a_server_names_the_users_line() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom") as seen:
        torch.std(torch.ones(1, device=REMOTE)).item()
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize("where", ["in_process"], indirect=True)
def test_their_number_is_bounded_and_each_text_comes_before_another_is_repeated() -> None:
    found = KernelWarnings()

    def resize(sizes: Iterable[int]) -> tuple[Warned, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for size in sizes:
                found.of(lambda size=size: torch.ops.aten.add.out(torch.ones(3), torch.ones(3), out=torch.ones(size)))
        return found.take()

    many = resize([*range(4, 4 + 2 * MAX_WARNINGS)] * 2)
    assert len(many) == len(set(many)) == MAX_WARNINGS
    assert {warned.category for warned in many} == {"UserWarning"}
    assert not found.take()
    repeated = resize([4] * 2 * MAX_WARNINGS + [5])
    assert len(repeated) == MAX_WARNINGS
    assert repeated.count(repeated[-1]) == 1
    few = resize([4, 5, 4])
    assert len(few) == 3
    assert len(set(few)) == 2
