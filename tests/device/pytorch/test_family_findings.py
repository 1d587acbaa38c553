"""Faults that drawing calls of every operator has brought to light."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes.warm import run_python

import djinn

aten = torch.ops.aten
REMOTE = torch.device("remote_accelerator:0")
CPU = torch.device("cpu")

BACKWARD_UNDER_A_TRACE_FUNCTION = """
import sys
import djinn
import torch

djinn.init()

def trace(frame, event, argument):
    return trace

sys.settrace(trace)
x = torch.rand(1, 1, 2, 2, device="remote_accelerator:0", requires_grad=True)
places = torch.zeros(10, dtype=torch.int64, device="remote_accelerator:0").as_strided((1, 1, 2, 2), (10, 10, 5, 2), 1)
result = torch.ops.aten.max_unpool2d(x, places, [4, 2])
try:
    torch.autograd.grad(result.sum(), x)
except RuntimeError as error:
    assert "view size is not compatible" in str(error), error
else:
    raise AssertionError("nothing was raised")
print("alive")
"""


def test_an_error_in_backward_under_a_trace_function_does_not_abort() -> None:
    done = run_python(BACKWARD_UNDER_A_TRACE_FUNCTION)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-1000:]


@pytest.mark.usefixtures("in_process")  # a server does not run `_neg_view_copy.out`
def test_an_exception_after_a_warning_is_not_hidden() -> None:
    def numbers(*size: int) -> torch.Tensor:
        return torch.arange(6.0, device=REMOTE).reshape(size)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Inferred, with a warning that the destination is resized, and refused where it runs.
        aten.index.Tensor_out(numbers(3, 2), [None], out=numbers(2, 3)[:, :2])
        with pytest.raises(RuntimeError, match="ntensor"):
            djinn.synchronize()
        for _ in range(100):
            # Inferred too, but for the layout: the executor is asked, and refuses.
            with pytest.raises(RuntimeError, match="ntensor"):
                aten.index.Tensor_out(numbers(2, 3).t(), [None], out=numbers(2, 3))
            with pytest.raises(NotImplementedError, match="neg_cpu"):
                aten._neg_view_copy.out((numbers(2, 3) > 1).t(), out=(numbers(3, 2) > 0).t())


@pytest.mark.parametrize(
    "call", [aten.gru_cell, aten.gru_cell.default, aten.lstm_cell, aten.lstm_cell.default], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_recurrent_cells_called_by_name_equal_eager(call: Any, mode: Callable[[], Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    is_lstm = "lstm" in str(call)
    width = 8 if is_lstm else 6
    data, hidden, cell, from_data, from_hidden = (
        torch.rand(size, generator=generator) for size in ((3, 3), (3, 2), (3, 2), (width, 3), (width, 2)))

    def run(device: torch.device) -> list[torch.Tensor]:
        with mode():
            x = data.to(device).requires_grad_(mode is torch.enable_grad)
            state = [hidden.to(device), cell.to(device)] if is_lstm else hidden.to(device)
            made = call(x, state, from_data.to(device), from_hidden.to(device))
            results = list(made) if is_lstm else [made]
            if mode is torch.enable_grad:
                results += torch.autograd.grad(results[0].sum(), x)
            return [result.detach().cpu() for result in results]

    assert all(map(torch.equal, run(REMOTE), run(CPU)))


@pytest.mark.parametrize("size", [(0, 4, 2), (4, 0, 2), (2, 0, 4, 2), (2, 3, 0, 4, 2)])
def test_pixels_of_nothing_are_shuffled_as_in_eager(size: tuple[int, ...]) -> None:
    for shuffle in (aten.pixel_unshuffle, aten.pixel_shuffle):
        try:
            wanted = shuffle(torch.zeros(size), 2)
        except RuntimeError:
            continue
        got = shuffle(torch.zeros(size, device=REMOTE), 2)
        assert (got.size(), got.stride()) == (wanted.size(), wanted.stride())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_convolution_without_channels_has_the_gradients_of_eager() -> None:
    def gradients(device: torch.device) -> list[torch.Tensor]:
        layer = torch.nn.Conv1d(0, 8, 2, stride=2).to(device)
        layer.bias.data.fill_(1)
        x = torch.ones(2, 0, 15, device=device, requires_grad=True)
        made = layer(x)
        made.sum().backward()
        return [item.cpu() for item in (made.detach(), x.grad, layer.weight.grad, layer.bias.grad)]

    for wanted, got in zip(gradients(CPU), gradients(REMOTE), strict=True):
        assert torch.equal(wanted, got)


def test_a_view_beyond_its_tensor_is_judged_by_its_own_storage() -> None:
    roomy = torch.arange(9.0, device=REMOTE).resize_(1)
    assert roomy.as_strided((3,), (1,), 0).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.zeros(1, device=REMOTE).as_strided((3,), (1,), 0)
    with torch.inference_mode():
        assert not roomy.as_strided((3,), (1,), 0).is_inference()


def test_destinations_of_the_right_size_keep_their_layout() -> None:
    permuted = torch.arange(24, device=REMOTE).reshape(4, 3, 2).permute(2, 1, 0)
    values, indices = torch.zeros(2, 3, 4, dtype=torch.int64, device=REMOTE), torch.empty_like(permuted)
    torch.sort(permuted, 0, True, out=(values, indices))
    assert values.stride() == values.cpu().stride() == (12, 4, 1)
    assert indices.stride() == indices.cpu().stride() == (1, 2, 6)
