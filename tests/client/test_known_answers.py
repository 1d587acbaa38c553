"""What was asked about values that have not changed is not asked again: counted, over a guarded server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn

pytestmark = pytest.mark.usefixtures("on_a_server")
DEVICE = "remote_accelerator:0"
ROUNDS = 200


@pytest.fixture(autouse=True)
def _anew() -> None:
    djinn.init(early_answers=False)


def _trips_of(action: Callable[[], Any], rounds: int = ROUNDS) -> tuple[int, list[Any]]:
    djinn.synchronize()
    djinn.reset_stats()
    made = [action() for _ in range(rounds)]
    return djinn.stats()["round_trips"], made


def _mask(device: str = DEVICE) -> torch.Tensor:
    return torch.ones(1000, device=device).sqrt()


@pytest.mark.parametrize("flush_every", ["auto", 1, None], ids=lambda every: f"flush_every={every}")
@pytest.mark.parametrize("ask", [
    lambda mask: bool((mask == 1).all()), lambda mask: mask.mean().item(), lambda mask: torch.equal(mask, mask * 1),
    lambda mask: bool(torch.zeros_like(mask).copy_(mask).any()), lambda mask: float(mask[7]),
], ids=["condition", "number", "equal", "written on the way", "element"])
def test_a_question_about_unchanged_values_is_asked_once(ask: Callable[[torch.Tensor], Any], flush_every: Any) -> None:
    djinn.init(early_answers=False, flush_every=flush_every)
    mask, other = _mask(), torch.ones(4, device=DEVICE)

    def once() -> Any:
        other.add_(1)
        return ask(mask)

    trips, answers = _trips_of(once)
    assert answers == ROUNDS * [ask(_mask("cpu"))]
    assert trips == 1
    assert djinn.stats()["answered_at_home"] == ROUNDS - 1
    assert other[0].item() == 1 + ROUNDS


@pytest.mark.parametrize("write", [
    lambda x: x.mul_(2), lambda x: x.view(-1)[1:].zero_(), lambda x: x.data.add_(torch.ones(4)),
    lambda x: x.detach().masked_fill_(x > 0, 5), lambda x: torch._foreach_add_([x], 1.0),
    lambda x: torch.add(x, 1, out=x), lambda x: x.set_(torch.full_like(x, 9)), lambda x: x.uniform_(),
    lambda x: torch.nn.functional.batch_norm(torch.ones(2, 4, device=x.device), x, x + 1, training=True),
], ids=["in place", "through a view", "from here", "through an alias", "list", "out", "set", "random", "statistics"])
def test_a_write_is_seen(write: Callable[[torch.Tensor], Any]) -> None:
    def rounds(device: str) -> list[Any]:
        torch.manual_seed(4)
        x = torch.arange(4.0, device=device) / 2
        alias = x.view(2, 2)
        made: list[Any] = []
        for number in range(9):
            made += [x.sum().item() > 4, alias.sum().item() > 4, (alias * 2).amax().item() > 4]
            if number % 3 == 2:
                write(x)
        return made

    assert rounds(DEVICE) == rounds("cpu")


def test_a_value_that_was_written_before_the_question_ends_is_asked_for_again() -> None:
    def rounds(device: str) -> list[float]:
        x, made = torch.zeros(4, device=device).exp(), []
        for _ in range(6):
            total = x.sum()
            x.add_(1)
            made.append(total.item())
        return made

    assert rounds(DEVICE) == rounds("cpu")


def test_numbers_and_other_tensors_make_other_questions() -> None:
    first, second = _mask(), _mask() + 1
    for _ in range(2):
        assert [(x == number).any().item() for x in (first, second) for number in (1, 2)] == [True, False, False, True]
        assert [(first * sign).sum().item() for sign in (1.0, -1.0)] == [1000, -1000]
    assert djinn.stats()["answered_at_home"] > 0


def test_random_numbers_are_drawn_each_time() -> None:
    mask = _mask()
    assert len({(mask * torch.rand_like(mask)).sum().item() for _ in range(5)}) == 5


def test_a_failure_is_raised_at_the_wait_where_it_would_be_without() -> None:
    mask, table = _mask(), torch.ones(3, 1, device=DEVICE)
    assert (mask == 1).all()
    lost = torch.nn.functional.embedding(torch.tensor([7]).to(DEVICE).float().long(), table)
    with pytest.raises(IndexError):
        bool((mask == 1).all())
    assert (mask == 1).all()
    del lost


@pytest.mark.usefixtures("without_collection")
def test_what_is_asked_once_only_leaves_nothing() -> None:
    handles = []
    for number in range(4):
        for _ in range(100):
            assert (_mask() * number).sum().item() == 1000 * number
        djinn.synchronize()
        handles.append(djinn.stats()["live_handles"])
    assert len(set(handles[1:])) == 1


@torch.no_grad()
def test_a_write_of_a_compiled_function_is_seen_each_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: x[1:].add_(y).sum() * 2, backend="djinn")
    shared = torch.compile(lambda x, y: (x.view(2, 2), y + 1), backend="djinn")
    x = torch.ones(4, device=DEVICE).sqrt()
    for number in range(4):
        assert x.sum().item() == 4 + 3 * number
        compiled(x, torch.ones((), device=DEVICE))
    seen, _ = shared(x, torch.ones((), device=DEVICE))
    for number in range(4):
        assert x.sum().item() == 16 + 4 * number
        seen.add_(1)


def test_it_can_be_switched_off() -> None:
    djinn.init(early_answers=False, known_value_bytes=0)
    mask = _mask()
    assert _trips_of(lambda: bool((mask == 1).all()), 5) == (5, 5 * [True])
