"""What a refused program should have written is not left as it was, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import djinn
from djinn.errors import UnknownOperatorError

DEVICE = "remote_accelerator:0"
pytestmark = pytest.mark.usefixtures("on_a_server")


def _directly(given: torch.Tensor, written: torch.Tensor) -> None:
    torch.ops.aten.relu.out(given, out=written)


def _through_a_view(given: torch.Tensor, written: torch.Tensor) -> None:
    torch.ops.aten.relu.out(given[1:], out=written.view(2, 2)[0, 1:])


def _beside_it(given: torch.Tensor, written: torch.Tensor) -> None:
    written.add_(given)
    torch.ops.aten.relu.out(given, out=torch.empty_like(given))


@pytest.mark.parametrize("write", [_directly, _through_a_view, _beside_it])
def test_a_write_that_is_refused_is_an_error_each_time(write: Callable[..., None]) -> None:
    for _ in range(3):
        given = torch.ones(4, device=DEVICE)
        written = torch.zeros(4, device=DEVICE)
        same = written[2:]
        djinn.synchronize()
        write(given[:2] if write is _through_a_view else given, written)
        for value in (written, same):
            with pytest.raises(UnknownOperatorError, match="is not run here"):
                value.cpu()
        assert given.tolist() == [1.0] * 4
