"""What random programs have found: short, so that each finding stays found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs

import djinn


def foreach_counts_writes(device: str) -> Any:
    x, y = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    torch._foreach_add_([x, y], 1.0)
    torch._foreach_mul_([x], 2.0)
    leaf = torch.ones(3, device=device, requires_grad=True)
    middle = leaf.exp()
    with torch.no_grad():
        torch._foreach_zero_([middle])
    return x, x._version, y._version, outcome(lambda: middle.sum().backward())


def scalars_are_formatted(device: str) -> Any:
    x = torch.tensor(1.5, device=device)
    return f"{x}", f"{x:.3f}", f"{x.to(torch.int64)}"


def metadata_changes_in_inference_mode(device: str) -> Any:
    x, y = torch.ones(2, 3, device=device), torch.arange(6.0, device=device)
    with torch.inference_mode():
        x.t_()
        y.resize_(2, 2)
        inside = torch.arange(6.0, device=device).unsqueeze_(0).squeeze_()
    return x, y, inside, x.is_inference(), y.is_inference()


def out_is_also_an_argument(device: str) -> Any:
    x, y = torch.arange(2.0, device=device), torch.ones(3, 2, device=device)
    refused = outcome(lambda: torch.add(x, y, out=x))
    z = torch.arange(3.0, device=device)
    return x, refused, outcome(lambda: torch.cat([z, z], out=z)), z.shape


def out_is_resized_before_it_is_refused(device: str) -> Any:
    x, target = torch.ones(5, 3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    refused = outcome(lambda: torch.stack([x, x], out=target))
    return refused, tuple(target.shape), tuple(target.cpu().shape), target.fill_(1)


def out_with_enough_elements_is_kept(device: str) -> Any:
    square, number = torch.zeros(2, 2, device=device), torch.zeros((), device=device)
    torch.arange(4, out=square)
    torch.linspace(0.0, 1.0, 1, out=number)
    other = torch.zeros(2, 2, device=device)
    torch.logspace(0.0, 1.0, 3, out=other)
    return square, number, other


def out_of_another_dtype(device: str) -> Any:
    x = torch.arange(3.0, device=device)
    bytes_, rows = x.to(torch.uint8), torch.tensor([0], device=device)
    return (
        outcome(lambda: torch.neg(x, out=torch.zeros(3, dtype=torch.complex64, device=device))),
        outcome(lambda: torch.index_select(bytes_, 0, rows, out=torch.zeros_like(rows))),
        torch.gt(x, 1, out=torch.zeros(3, device=device)), torch.add(x, 1, out=torch.zeros(3).double().to(device)),
    )


def overlapping_writes_are_refused(device: str) -> Any:
    x = torch.ones(1, device=device)
    return outcome(lambda: x.expand(3).add_(1)), outcome(lambda: x.expand(3).fill_(2)), x


def views_past_the_storage_are_refused(device: str) -> Any:
    x = torch.arange(6.0, device=device)
    return (
        outcome(lambda: x.as_strided((4,), (2,))), outcome(lambda: x.as_strided((2,), (1,), 5)),
        outcome(lambda: x[2:].as_strided_((7,), (1,))), x.as_strided((2,), (1,), 4),
    )


def writes_of_another_rank_are_refused(device: str) -> Any:
    square, row = torch.ones(3, 3, device=device), torch.ones(3, device=device)
    number, rows = torch.ones((), device=device), torch.tensor([0], device=device)
    with torch.inference_mode():
        inside = outcome(lambda: square[None].addmm_(square, square))
    return (
        outcome(lambda: torch.addmm(square, square, square[:, :1])), torch.addmm(row, square, square),
        torch.addmm(number, square, square[:, :1]), torch.addmv(number, square, row),
        square.clone().addmm_(square, square),
        inside, outcome(lambda: square[None].addmm_(square, square)), outcome(lambda: square.addmv_(square, row)),
        outcome(lambda: number.index_put_((rows,), torch.ones((), device=device))), square,
    )


def composites_in_inference_mode_are_views(device: str) -> Any:
    x = torch.arange(6.0, device=device).view(2, 3)
    with torch.inference_mode():
        views = [x.T, x.reshape(3, 2), x.flatten(), x.swapaxes(0, 1), *x.chunk(2), x.narrow(0, 0, 1)]
        x.T.fill_(2)
        x.reshape(-1)[0] = 7
        views[2].add_(1)
        torch.nn.functional.dropout(x, 0.0, inplace=True)
    return views, [view._is_view() for view in views], [view._version for view in views], x, x._version


def data_becomes_an_inference_tensor(device: str) -> Any:
    x, y = torch.zeros(2, device=device), torch.zeros(2, device=device)
    with torch.inference_mode():
        x.data = torch.ones(3, device=device)
    y.data = x.detach().clone()
    return x, x.is_inference(), y, y.is_inference()


def a_part_that_is_moved_begins_at_its_own_storage(device: str) -> Any:
    local = torch.arange(6.0).view(2, 3)
    moved = local[1:].to(device, copy=True)
    return moved, moved.storage_offset(), moved.as_strided((2,), (1,), 1), moved.as_strided((3,), (1,))


@programs(
    foreach_counts_writes, scalars_are_formatted, metadata_changes_in_inference_mode, out_is_also_an_argument,
    out_is_resized_before_it_is_refused, out_with_enough_elements_is_kept, out_of_another_dtype,
    views_past_the_storage_are_refused, writes_of_another_rank_are_refused,
    composites_in_inference_mode_are_views, data_becomes_an_inference_tensor,
    a_part_that_is_moved_begins_at_its_own_storage,
)
def test_programs_are_those_of_eager(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same(program)


@pytest.mark.usefixtures("in_process")  # a server refuses more of them; docs/server.md
def test_overlapping_writes_are_refused_as_in_eager() -> None:
    assert_same(overlapping_writes_are_refused)


def _refused_at_once() -> None:
    torch.ones(31, 37, device=DEVICE) @ torch.ones(31, 37, device=DEVICE)


def _refused_at_a_wait() -> None:
    rows = torch.nn.functional.embedding(torch.tensor([9], device=DEVICE), torch.ones(2, 2, device=DEVICE))
    rows.tolist()


@pytest.mark.parametrize("fail", [_refused_at_once, _refused_at_a_wait])
@pytest.mark.usefixtures("without_collection")
def test_an_exception_that_was_handled_holds_no_tensor(fail: Callable[[], None]) -> None:
    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    with pytest.raises((RuntimeError, IndexError)) as caught:
        fail()
    del caught
    djinn.synchronize()
    assert djinn.stats()["live_handles"] == before


def test_a_write_that_told_of_an_earlier_failure_can_be_repeated() -> None:
    x = torch.zeros(3, dtype=torch.complex64, device=DEVICE)
    djinn.synchronize()
    lost = torch.ones(3, device=DEVICE).index_select(0, torch.tensor([7], device=DEVICE))
    # Complex numbers: only the executor can say whether this may be written.
    with pytest.raises(IndexError):
        x.addcmul_(x + 1, x + 1)
    x.addcmul_(x + 1, x + 1)
    assert x.tolist() == [1, 1, 1]
    assert lost.shape == (1,)
