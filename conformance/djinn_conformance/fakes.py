"""Lines that work on tensors without data: the metadata that they give on a device is compared with the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def _described(tree: Any, device: torch.device) -> Any:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [[type(leaf).__name__, leaf.device == device, str(leaf.dtype), [str(n) for n in leaf.shape],
             [str(n) for n in leaf.stride()], leaf.requires_grad] for leaf in leaves]


def _views(device: torch.device) -> Any:
    with FakeTensorMode():
        x = torch.arange(12.0, device=device).view(3, 4)
        return _described([x.t(), x[0], x[:, 1:3], x.unbind(), x.split(2), x.permute(1, 0), x.diagonal(),
                           x.unsqueeze(0).squeeze(), x.expand(2, 3, 4), x.clone(), x.detach(), x.view(torch.int32),
                           x.transpose(0, 1).contiguous(), x.to(torch.complex64).conj()], device)


def _writes(device: torch.device) -> Any:
    with FakeTensorMode():
        x = torch.zeros(3, 4, device=device)
        x.t_().transpose_(0, 1).unsqueeze_(0).squeeze_().copy_(torch.ones(3, 4, device=device))
        x.resize_as_(torch.ones(2, 2, device=device)).add_(1)
        return _described(x, device)


def _training(device: torch.device) -> Any:
    # Autograd has no thread for a device that is registered after the process's first backward pass.
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        model = nn.Sequential(nn.Linear(4, 8, device=device), nn.GELU(), nn.LayerNorm(8, device=device))
        made = model(torch.randn(3, 4, device=device))
        made.square().sum().backward()
        return _described([made, [parameter.grad for parameter in model.parameters()]], device)


def _moves(device: torch.device) -> Any:
    with FakeTensorMode():
        there = torch.ones(2, 3).to(device)
        return [_described([there, torch.tensor([1, 2], device=device)], device),
                _described(there.cpu(), torch.device("cpu"))]


def _of_real_ones(device: torch.device) -> Any:
    real = torch.ones(4, 6, device=device).t()[1:]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(real)
    with mode:
        return _described([fake, fake @ real.t(), real.sum()], device)


def _traced(device: torch.device) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device).requires_grad_(False)
    x = torch.arange(8.0, device=device).view(2, 4)
    graphs = [make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x) for mode in ("fake", "symbolic")]
    return [[[str(node.target) for node in graph.graph.nodes] for graph in graphs],
            [graph(x).cpu().tolist() for graph in graphs]]


def _exported(device: torch.device) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(device).requires_grad_(False)
    sizes = ({0: torch.export.Dim("rows", min=2)},)
    exported = torch.export.export(model, (torch.ones(3, 4, device=device),), dynamic_shapes=sizes)
    longer = torch.arange(20.0, device=device).view(5, 4)
    return [str(exported.graph), exported.module()(longer).cpu().tolist()]


LINES: Mapping[str, Callable[[torch.device], Any]] = {
    "views": _views, "writes in place": _writes, "training": _training, "moves": _moves,
    "fakes of real tensors": _of_real_ones, "make_fx": _traced, "torch.export": _exported,
}
"""Lines for any device."""
