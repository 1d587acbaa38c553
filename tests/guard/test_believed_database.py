"""PyTorch's databases of modules and operators, as a client records them for a CUDA executor: a guard refuses none.

Results are compared with local PyTorch's elsewhere. Here a guarded server runs, with the kernels of its CPU, what would
run on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.believed_cuda import believed_cuda
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import djinn
from djinn.errors import UnknownOperatorError

D = "remote_accelerator:0"
PARTS = 8
"""One part in this many of the operators is tried, another one in each release of PyTorch."""
REFUSED_ANYWHERE = ("sparse", "_efficientzerotensor", "linear_cross_entropy_batch_chunked")
"""Parts of names of what the guard refuses for every device."""


def moved(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(D).requires_grad_(tensor.requires_grad), tree)


class Tried:
    """How samples went: which operators were refused, and how many samples ran to their end."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.count = self.ran = 0

    def run(self, name: str, sample: Callable[[], Any]) -> None:
        """Run a sample, with its backward pass."""
        self.count += 1
        try:
            results = [leaf for leaf in tree_leaves(sample()) if isinstance(leaf, torch.Tensor)]
            trained = [leaf for leaf in results if leaf.requires_grad and leaf.is_floating_point()]
            if trained:
                torch.stack([leaf.square().sum() for leaf in trained]).sum().backward()
            for leaf in results:
                leaf.detach().cpu()
            djinn.synchronize()
        except UnknownOperatorError as error:
            self.refused += [] if any(part in str(error) for part in REFUSED_ANYWHERE) else [f"{name}: {error}"]
        except Exception:  # what a sample raises is compared with eager elsewhere
            return
        else:
            self.ran += 1


def test_every_module_is_recorded_with_operators_that_a_guard_allows(server: Any) -> None:
    tried = Tried()
    with warnings.catch_warnings(), believed_cuda(server=server.address):
        warnings.simplefilter("ignore")
        for info in module_db:
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
            for sample in list(samples)[:1]:
                built, given = sample.constructor_input, sample.forward_input
                module = info.module_cls(*built.args, **built.kwargs).to(D)
                tried.run(info.name, lambda: module(*moved(given.args), **moved(given.kwargs)))  # noqa: B023  # called at once
    assert tried.refused == []
    assert tried.ran > 0.9 * tried.count, (tried.ran, tried.count)


@pytest.mark.parametrize("part", [sum(map(ord, torch.__version__)) % PARTS])
def test_operators_are_recorded_with_operators_that_a_guard_allows(server: Any, part: int) -> None:
    tried = Tried()
    with warnings.catch_warnings(), believed_cuda(server=server.address):
        warnings.simplefilter("ignore")
        for info in op_db[part::PARTS]:
            if torch.float32 not in info.dtypes:
                continue
            for sample in list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))[:1]:
                args, kwargs = moved((sample.input, *sample.args)), moved(sample.kwargs)
                tried.run(info.name, lambda: info.op(*args, **kwargs))  # noqa: B023  # called at once
    assert tried.refused == []
    assert tried.ran > 0.9 * tried.count, (tried.ran, tried.count)
