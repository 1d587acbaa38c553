"""Batch norm and RMS norm as a client records them for a CUDA executor.

A guarded server runs them with the kernels of its CPU.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.recording.believed_cuda import believed_cuda
from torch import nn

import djinn
from djinn_plugins.common.operators.norms import norm_operators

D = "remote_accelerator:0"
LAYERS = {
    "1d": (nn.BatchNorm1d(4), (6, 4, 5)), "2d": (nn.BatchNorm2d(4), (3, 4, 5, 6)),
    "3d": (nn.BatchNorm3d(4), (2, 4, 3, 2, 3)),
    "untracked": (nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 5, 6)),
    "instance": (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 6)),
}


def names_in(captured: Any) -> list[str]:
    return [node.operation for node in captured.graph.nodes()]


def made(kind: str, *, last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer, size = LAYERS[kind]
    data = torch.randn(size)
    if last:
        data = data.to(memory_format=torch.channels_last if data.dim() == 4 else torch.channels_last_3d)
    return copy.deepcopy(layer), data


def results(layer: nn.Module, data: torch.Tensor, device: str) -> list[torch.Tensor]:
    layer.to(device)
    leaf = data.detach().to(device).requires_grad_()
    output = layer(leaf)
    (output * output.detach().sin()).sum().backward()
    found = [output, leaf.grad, *(parameter.grad for parameter in layer.parameters()), *layer.buffers()]
    return [tensor.detach() for tensor in found if tensor is not None]


def expect_equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other)


def recorded(server: Any, layer: nn.Module, data: torch.Tensor) -> list[str]:
    """Expect the results of the CPU from a layer each way, and name the operations that were recorded."""
    wanted = results(copy.deepcopy(layer), data, "cpu")
    with believed_cuda(server=server.address):
        with djinn.capture(modules=False) as captured:
            got = results(layer, data, D)
        expect_equal(got, wanted)
    return names_in(captured)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_training_is_one_operation_each_way_for_the_executor_to_choose(server: Any, kind: str, last: bool) -> None:
    if last and kind == "1d":
        pytest.skip("there is no such memory format")
    layer, data = made(kind, last=last)
    names = recorded(server, layer, data)
    assert (names.count("djinn::batch_norm_training"), names.count("djinn::batch_norm_gradients")) == (1, 1), names


def test_inference_is_one_operation_and_its_gradients_are_pytorchs_own(server: Any) -> None:
    layer, data = made("2d")
    layer(data)
    layer.eval()
    names = recorded(server, layer, data)
    backward = names.count("aten::native_batch_norm_backward")
    assert (names.count("djinn::batch_norm_inference"), backward) == (1, 1), names


def test_a_new_size_costs_no_round_trip(server: Any) -> None:
    layer, _ = made("2d")
    with believed_cuda(server=server.address):
        layer.to(D)
        results(layer, torch.randn(2, 4, 3, 3), D)
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        before = djinn.stats()["round_trips"]
        for extent in range(4, 9):
            layer(torch.randn(2, 4, extent, 3, device=D)).sum().backward()
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        assert djinn.stats()["round_trips"] - before == 1


@pytest.mark.parametrize("kind", ["batch", "rms"])
def test_gradients_of_gradients(server: Any, kind: str) -> None:
    layer, data = made("2d")
    layer = nn.RMSNorm(6) if kind == "rms" else layer

    def second(device: str) -> torch.Tensor:
        leaf = data.detach().to(device).requires_grad_()
        [first] = torch.autograd.grad(layer.to(device)(leaf).sin().sum(), leaf, create_graph=True)
        [found] = torch.autograd.grad(first.square().sum(), leaf)
        return found.cpu()

    wanted = second("cpu")
    with believed_cuda(server=server.address):
        torch.testing.assert_close(second(D), wanted)


@pytest.mark.parametrize("why", ["flat", "bfloat16", "no weight", "switched off"])
def test_what_cudnn_does_not_take_is_recorded_as_before(server: Any, why: str) -> None:
    layer: nn.Module = nn.BatchNorm1d(4) if why == "flat" else nn.BatchNorm2d(4, affine=why != "no weight")
    data = torch.randn(6, 4) if why == "flat" else torch.randn(3, 4, 5, 6)
    if why == "bfloat16":
        layer, data = layer.bfloat16(), data.bfloat16()
    with (
        believed_cuda(server=server.address), torch.backends.cudnn.flags(enabled=why != "switched off"),
        djinn.capture(modules=False) as captured,
    ):
        layer.to(D)(data.to(D)).cpu()
    assert not [name for name in names_in(captured) if name.startswith("djinn::")]


def test_gradients_that_nobody_asked_for_are_none(server: Any) -> None:
    with believed_cuda(server=server.address):
        data, channel = torch.randn(3, 4, 5, 6, device=D), torch.ones(4, device=D)
        found = torch.ops.aten.native_batch_norm_backward(
            data, data, channel, channel, channel, channel, channel, True, 1e-5, [False, True, False])
        assert [one is None for one in found] == [True, False, True]


def test_a_guard_refuses_what_does_not_fit(server: Any) -> None:
    operators = norm_operators()
    data, channel = torch.ones(2, 4, 3, 3), torch.ones(4)
    with believed_cuda(server=server.address), torch.no_grad():
        data, channel, short = data.to(D), channel.to(D), torch.ones(3, device=D)
        for call in (
            lambda: operators.training(data, short, channel, None, None, 0.1, 1e-5),
            lambda: operators.training(data, channel, channel, channel + 0, short, 0.1, 1e-5),
            lambda: operators.inference(data, channel, channel, channel, short, 1e-5),
            lambda: operators.backward(data[:1], data, channel, channel, channel, 1e-5),
            lambda: operators.backward(data, data, channel, channel, channel.double(), 1e-5),
            lambda: operators.rms_training(data, [4], None, 1e-5),
            lambda: operators.rms_training(data, [3], channel, 1e-5),
            lambda: operators.rms_training(data, [3], short.double(), 1e-5),
            lambda: operators.rms_backward(data[:1], data, [3], data[..., :1], short),
            lambda: operators.rms_backward(data, data, [3], data, short),
        ):
            with pytest.raises(RuntimeError, match=r"has the size|does not fit"):
                call()[0].cpu()


def test_rms_norm_without_gradients_is_one_operation(server: Any) -> None:
    layer, data = nn.RMSNorm(6), torch.randn(3, 6)
    with believed_cuda(server=server.address), torch.no_grad():
        layer, there = layer.to(D), data.to(D)
        with djinn.capture(modules=False) as captured:
            got = layer(there)
        torch.testing.assert_close(got.cpu(), layer.cpu()(data))
    assert names_in(captured) == ["aten::rms_norm"]


@pytest.mark.parametrize("kind", ["weight", "no weight", "two dimensions", "strided"])
def test_rms_norm_is_trained_by_one_operation_each_way(server: Any, kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.RMSNorm((5, 6) if kind == "two dimensions" else 6, elementwise_affine=kind != "no weight")
    data = torch.randn(3, 6, 5).mT if kind == "strided" else torch.randn(3, 5, 6)
    names = recorded(server, layer, data)
    assert (names.count("djinn::rms_norm_training"), names.count("djinn::rms_norm_gradients")) == (1, 1), names
    assert "aten::rsqrt" not in names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rms_norm_in_other_dtypes(server: Any, dtype: torch.dtype) -> None:
    layer, data = nn.RMSNorm(6, dtype=dtype), torch.randn(3, 6, dtype=dtype)
    assert "djinn::rms_norm_training" in recorded(server, layer, data)


@pytest.mark.parametrize("why", ["weight of another dtype", "channels last", "autocast"])
def test_rms_norm_is_decomposed_where_local_cuda_does(server: Any, why: str) -> None:
    layer, data = nn.RMSNorm(6), torch.randn(2, 3, 5, 6)
    data = data.bfloat16() if why == "weight of another dtype" else (
        data.to(memory_format=torch.channels_last) if why == "channels last" else data)
    with (
        believed_cuda(server=server.address), warnings.catch_warnings(),
        torch.autocast("remote_accelerator", torch.bfloat16, enabled=why == "autocast"),
    ):
        warnings.simplefilter("ignore")
        with djinn.capture(modules=False) as captured:
            layer.to(D)(data.to(D)).sum().backward()
    assert not [name for name in names_in(captured) if name.startswith("djinn::")]
