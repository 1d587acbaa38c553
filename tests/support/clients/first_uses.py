"""Several threads of a fresh process use each part of djinn for the first time at once. Prints what differs from eager.

What registers something once is slowed down, so that every thread arrives before the first one has finished.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.utils._pytree
from torch.nn import functional as F

import djinn

DEVICE = "remote_accelerator:0"
THREADS = 6
DELAY_S = 0.01
torch.manual_seed(0)
X = torch.randn(5, 8)
LAYER = torch.nn.Linear(8, 8)
ENCODER = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
LSTM = torch.nn.LSTM(8, 4)


def slow(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return original(*args, **kwargs)

    setattr(owner, name, classmethod(call) if isinstance(vars(owner).get(name), classmethod) else call)


class Image(torch.Tensor):
    """A class of another library."""


def autocast(device: str) -> Any:
    with torch.no_grad(), torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        return F.linear(X.to(device), LAYER.weight.to(device), LAYER.bias.to(device))


def compiled(device: str) -> Any:
    del device
    return torch.compile(lambda x: (x * 2).sin(), backend="djinn")(X)


def sparse(device: str) -> Any:
    return X.to(device).relu().to_sparse() @ torch.ones(8, 2, device=device)


def subclass(device: str) -> Any:
    image = X.to(device).as_subclass(Image) * 2
    return torch.tensor(isinstance(image, Image)), image.as_subclass(torch.Tensor)


def trained(model: torch.nn.Module, device: str) -> Any:
    moved = copy.deepcopy(model).to(device)
    made = moved(X.to(device)[None])
    (made[0] if isinstance(made, tuple) else made).square().sum().backward()
    return [parameter.grad for parameter in moved.parameters()]


def saved(device: str) -> Any:
    held = io.BytesIO()
    torch.save({"x": X.to(device)}, held)
    held.seek(0)
    return torch.load(held, map_location=device)["x"]


def jagged(device: str) -> Any:
    rows = torch.nested.nested_tensor([X[:2].to(device), X[2:].to(device)], layout=torch.jagged)
    return torch.nested.to_padded_tensor(rows, 0.0)


def loss(device: str) -> Any:
    target = torch.zeros(5, dtype=torch.long, device=device)
    return F.linear_cross_entropy(X.to(device), torch.ones(3, 8, device=device), target)


ACTIONS: dict[str, Callable[[str], Any]] = {
    "autocast": autocast, "compiled": compiled, "sparse": sparse, "subclass": subclass, "saved": saved,
    "jagged": jagged, "topk": lambda device: tuple(torch.topk(X.to(device), 2)),
    "lstm": lambda device: trained(LSTM, device), "encoder": lambda device: trained(ENCODER, device),
    "batch norm": lambda device: trained(torch.nn.BatchNorm1d(5), device),
    "generator": lambda device: torch.randn(3, device=device, generator=torch.Generator(device).manual_seed(1)),
    "grad": lambda device: torch.func.grad(lambda x: x.sin().sum())(X.to(device)),
    **({"loss": loss} if hasattr(F, "linear_cross_entropy") else {}),
}


def flat(made: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(list(made) if isinstance(made, tuple) else made)
    return [(leaf.dtype, leaf.detach().cpu().tolist()) for leaf in leaves]


for owner, name in ((torch.library.Library, "__init__"), (EntryPoint, "load"), (ForkingPickler, "register"),
                    (torch.serialization, "register_package"), (torch.utils._pytree, "register_pytree_node")):
    slow(owner, name)
for name, act in ACTIONS.items():
    expected = flat(act("cpu")) if name != "compiled" else flat((X * 2).sin())
    barrier, problems = threading.Barrier(THREADS), []

    def use(act: Callable[[str], Any] = act, expected: Any = expected, barrier: Any = barrier,
            problems: list[str] = problems) -> None:
        barrier.wait()
        try:
            found = flat(act(DEVICE))
            if found != expected:
                problems.append(f"{found} is not {expected}")
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=use) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        print(f"{name}: {len(problems)} of {THREADS}: {problems[0]}")
with contextlib.suppress(djinn.DjinnError):
    djinn.shutdown()
print("done")
