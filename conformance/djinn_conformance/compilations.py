"""Modules for `torch.compile`, drawn piece by piece, and what a user sees of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it
from hypothesis import strategies as st

WIDTH = 8


class Layers(torch.nn.Module):
    """What pieces use: layers, and buffers that they write."""

    count: torch.Tensor
    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.batch = torch.nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.ones(WIDTH))


Piece = Callable[[Layers, torch.Tensor], torch.Tensor]


def _attended(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    heads = layers.linear(x).view(1, -1, 2, WIDTH // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(x.shape)


def _counted(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    layers.count.add_(1)
    return x + layers.count


def _averaged(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layers.running.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
    return x * layers.running


def _in_place(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, 1:].mul_(2)
    made[0] = 3
    return made


def _lower(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        made: torch.Tensor = layers.linear(layers.linear(x)).float()
    return made


def _broken(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    x = layers.linear(x)
    torch._dynamo.graph_break()
    return x.tanh()


PIECES: Mapping[str, Piece] = {
    "linear": lambda layers, x: layers.linear(x),
    "norm": lambda layers, x: layers.norm(x),
    "batch norm": lambda layers, x: layers.batch(x),
    "gelu": lambda layers, x: F.gelu(x),
    "dropout": lambda layers, x: F.dropout(x, 0.5),
    "attention": _attended,
    "noise": lambda layers, x: x + torch.randn_like(x),
    "positions": lambda layers, x: x + torch.arange(x.shape[0], device=x.device).unsqueeze(1),
    "constant": lambda layers, x: x * torch.tensor([0.5, 2.0], device=x.device).repeat(WIDTH // 2),
    "views": lambda layers, x: x.t()[::2].reshape(WIDTH // 2, -1).t().repeat(1, 2),
    "greatest": lambda layers, x: x - x.max(-1, keepdim=True).values,
    "writes in place": _in_place,
    "counter": _counted,
    "running mean": _averaged,
    "autocast": _lower,
    "graph break": _broken,
}
RESULTS: Mapping[str, Callable[[Layers, torch.Tensor, torch.Tensor], Any]] = {
    "the last": lambda layers, given, x: x,
    "apart": lambda layers, given, x: (x, x.exp()),
    "twice": lambda layers, given, x: (x, x),
    "parts": lambda layers, given, x: x.chunk(2, -1),
    "view of the argument": lambda layers, given, x: (x, given.t()[1:]),
    "the argument": lambda layers, given, x: (given, x.shape[0]),
    "a buffer": lambda layers, given, x: (x, layers.running),
    "the argument written": lambda layers, given, x: given.mul_(2),
}


@attrs.frozen
class Drawn:
    """A module, by the names of its pieces."""

    pieces: tuple[str, ...]
    result: str

    def made(self) -> _Made:
        """Make the module with initial values that a seed decides."""
        torch.manual_seed(7)
        return _Made(self)


class _Made(Layers):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self._pieces = [PIECES[name] for name in drawn.pieces]
        self._result = RESULTS[drawn.result]

    def forward(self, given: torch.Tensor) -> Any:
        x = given
        for piece in self._pieces:
            x = piece(self, x)
        return self._result(self, given, x)


def drawn_modules() -> st.SearchStrategy[Drawn]:
    """Draw modules."""
    return st.builds(Drawn, st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4).map(tuple),
                     st.sampled_from(sorted(RESULTS)))


def seen_of_calls(
    module: _Made, call: Callable[[torch.Tensor], Any], rows: tuple[int, ...], device: torch.device, mode: Any,
    *, trains: bool = False,
) -> list[Any]:
    """Call a module with several arguments, and list all that a user can see of it; between calls, train it."""
    torch.manual_seed(3)
    seen: list[Any] = []
    for number, count in enumerate(rows):
        start = (torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) / 7 - number).to(device)
        given = start.requires_grad_() * 1 if trains else start
        version = given._version
        with mode():
            results = torch.utils._pytree.tree_leaves(call(given))
        for result in results:
            if not isinstance(result, torch.Tensor):
                seen.append(result)
                continue
            seen += [result.detach().cpu(), result.stride(), result.storage_offset(), result.device == given.device]
            seen += [[result is other for other in results], result.data_ptr() == given.data_ptr()]
            seen += [result._base is given, result.requires_grad]
        if trains:
            seen += _trained(module, start, given, results, number)
        seen += [given.detach().cpu(), given._version - version, *[buffer.cpu() for buffer in module.buffers()],
                 *[buffer._version for buffer in module.buffers()], torch.rand(2, device=device).cpu()]
    return seen


def _trained(
    module: _Made, start: torch.Tensor, given: torch.Tensor, results: list[Any], number: int
) -> list[torch.Tensor]:
    """Take a step by the gradients of the results, and return the gradients. Every other step uses the first result."""
    found = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    used = found[:1] if number % 2 else found
    # What comes before and after the module adds to its gradients.
    loss = module.linear.weight.square().sum() + given.sin().sum() + start.sum()
    for result in used:
        loss = loss + (result * torch.arange(result.numel(), device=result.device).view(result.shape)).float().sum()
    loss.backward(retain_graph=number == 3)
    if number == 3:
        loss.backward()
    gradients = []
    with torch.no_grad():
        for tensor in (start, *module.parameters()):
            if tensor.grad is not None:
                gradients.append(tensor.grad.cpu())
                tensor.sub_(tensor.grad, alpha=0.01)
                tensor.grad = None
    return gradients
