"""Floating-point operations are those that PyTorch's own counter counts, within 1%."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models.labelled_families import FAMILIES, Family
from support.recording.annotated import DEVICE, annotated, recorded, there
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import djinn

aten = torch.ops.aten
# The counter knows the fused kernels of GPUs, and not their sibling for processors.
SIBLINGS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    djinn.init(device="cpu", flush_every=None)
    yield
    djinn.shutdown()


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Let recurrent layers be taken apart: the counter does not know the library's own."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def _counted(work: Callable[[], object], *, fused: bool = False) -> int:
    """Let the counter watch local PyTorch, which takes apart what it has no formula for."""
    mapping = {sibling: lambda *a, known=flop_registry[known], out_val=None, **k: known(*a, out_val=out_val, **k)
               for sibling, known in SIBLINGS.items()}
    for formula in mapping.values():
        formula._get_raw = True
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else [SDPBackend.MATH]
    with _without_mkldnn(), sdpa_kernel(backends, set_priority=True), \
            FlopCounterMode(display=False, custom_mapping=mapping if fused else None) as counter:
        work()
    return counter.get_total_flops()


def _equal(ours: int, theirs: int) -> None:
    assert theirs > 0
    assert math.isclose(ours, theirs, rel_tol=0.01), f"{ours} for {theirs}: {ours / theirs:.4f}"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_forward_pass_costs_what_the_counter_says(family: Family, grad: bool) -> None:
    local, inputs = family.model(), family.inputs()
    remote, moved = family.model().to(DEVICE), there(inputs)
    with torch.set_grad_enabled(grad):
        theirs = _counted(lambda: local(**inputs))
        graph = recorded(remote, lambda: remote(**moved))
    annotations = annotated(graph)
    assert annotations.profile is not None
    _equal(annotations.profile.flops, theirs)
    assert annotations.profile.flops == sum(known["flops"] for known in annotations.nodes.values())


def _loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    made = model(**inputs)
    return (made if isinstance(made, torch.Tensor) else made[0]).float().square().mean()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "resnet", "convnext", "hand_written_gpt",
                                  "hand_written_cnn"])
def test_a_training_step_costs_what_the_counter_says(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    local, inputs = family.model().train(), family.inputs()
    remote, moved = copy.deepcopy(local).to(DEVICE), there(inputs)
    # Dropout takes attention apart, here as there.
    theirs = _counted(lambda: _loss(local, inputs).backward(), fused=True)
    graph = recorded(remote, lambda: _loss(remote, moved).backward())
    profile = annotated(graph).profile
    assert profile is not None
    _equal(profile.flops, theirs)


def _x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(size)).reshape(size).to(dtype)


CALLS: dict[str, Callable[[Callable[..., torch.Tensor]], object]] = {
    "linear": lambda x: functional.linear(x(2, 3, 4), x(5, 4), x(5)),
    "linear of a vector": lambda x: functional.linear(x(4), x(5, 4)),
    "matmul": lambda x: x(2, 1, 3, 4) @ x(5, 4, 6),
    "addmm": lambda x: torch.addmm(x(6), x(3, 4), x(4, 6)),
    "baddbmm": lambda x: torch.baddbmm(x(2, 3, 6), x(2, 3, 4), x(2, 4, 6)),
    "einsum": lambda x: torch.einsum("bik,bkj->bij", x(2, 3, 4), x(2, 4, 5)),
    "einsum of three": lambda x: torch.einsum("ik,kj,jl->il", x(3, 4), x(4, 5), x(5, 6)),
    "tensordot": lambda x: torch.tensordot(x(3, 4, 5), x(4, 5, 6), 2),
    "inner": lambda x: torch.inner(x(3, 4), x(5, 4)),
    "conv1d": lambda x: functional.conv1d(x(2, 3, 16), x(5, 3, 3), x(5), stride=2, padding=1),
    "conv2d": lambda x: functional.conv2d(x(2, 4, 8, 8), x(6, 2, 3, 3), groups=2, dilation=2),
    "conv2d of one": lambda x: functional.conv2d(x(4, 8, 8), x(6, 4, 3, 3), padding="same"),
    "conv3d": lambda x: functional.conv3d(x(1, 2, 4, 4, 4), x(3, 2, 2, 2, 2)),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(x(2, 4, 5, 5), x(4, 3, 3, 3), stride=2),
    "conv_transpose1d of one": lambda x: functional.conv_transpose1d(x(4, 5), x(4, 3, 3)),
    "attention": lambda x: functional.scaled_dot_product_attention(x(2, 4, 3, 8), x(2, 4, 7, 8), x(2, 4, 7, 6)),
    "grouped attention": lambda x: functional.scaled_dot_product_attention(
        x(2, 4, 3, 8), x(2, 2, 7, 8), x(2, 2, 7, 8), enable_gqa=True),
    "causal attention without heads": lambda x: functional.scaled_dot_product_attention(
        x(2, 5, 8), x(2, 5, 8), x(2, 5, 8), is_causal=True),
    "lstm cell": lambda x: torch.lstm_cell(x(3, 4), (x(3, 5), x(3, 5)), x(20, 4), x(20, 5)),
    "gru cell": lambda x: torch.gru_cell(x(3, 4), x(3, 5), x(15, 4), x(15, 5)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_what_the_counter_says(name: str, grad: bool) -> None:
    def made(*size: int) -> torch.Tensor:
        return _x(*size).requires_grad_(grad)

    theirs = _counted(lambda: CALLS[name](made))
    model = nn.Identity()
    graph = recorded(model, lambda: CALLS[name](lambda *size: _x(*size).to(DEVICE).requires_grad_(grad)))
    profile = annotated(graph).profile
    assert profile is not None
    assert profile.flops == theirs


@pytest.mark.parametrize("layers", [nn.LSTM(4, 5, 2, bidirectional=True), nn.LSTM(4, 6, proj_size=3),
                                    nn.GRU(4, 5), nn.RNN(4, 5, 2)], ids=["lstm", "projected lstm", "gru", "rnn"])
def test_recurrent_layers_cost_what_the_counter_says(layers: nn.Module) -> None:
    with torch.no_grad():
        theirs = _counted(lambda: layers(_x(7, 2, 4)))
        remote = copy.deepcopy(layers).to(DEVICE)
        graph = recorded(remote, lambda: remote(_x(7, 2, 4).to(DEVICE)))
    profile = annotated(graph).profile
    assert profile is not None
    assert profile.flops == theirs
