"""Values that eager's kernels check, where PyTorch takes other formulas for other devices: the same class of error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import djinn

_CALLS = """
    F.one_hot(n([5]), 3)
    F.one_hot(n([-1]), 3)
    F.one_hot(n([-1, 2]))
    F.one_hot(n([0]), 0)
    F.one_hot(n([]))
    F.one_hot(f(2))
    F.one_hot(n([[1, 0], [2, 0]]))
    F.one_hot(n([[1, 0], [2, 0]]), 4)
    F.embedding(n([9]), f(2, 2))
    F.embedding(n([-1]), f(2, 2), max_norm=1.0)
    F.embedding_bag(n([9]), f(2, 2), n([0]))
    F.embedding_bag(n([0, 1]), f(2, 2), n([1]))
    F.embedding_bag(n([0, 1]), f(2, 2), n([0, 5]))
    F.nll_loss(f(2, 3), n([0, 3]))
    F.nll_loss(f(2, 3), n([0, -1]))
    F.nll_loss(f(1, 3, 2), n([[0, 7]]))
    F.cross_entropy(f(2, 3), n([0, 7]), label_smoothing=0.1)
    F.cross_entropy(f(2, 3), n([0, -5]), weight=f(3), reduction="none")
    F.multi_margin_loss(f(2, 3), n([0, 4]))
    F.multilabel_margin_loss(f(1, 3), n([[5, -1, -1]]))
    F.binary_cross_entropy(f(2) * 1.5, f(2))
    F.gaussian_nll_loss(f(2), f(2), -f(2))
    f(2, 3).gather(1, n([[5], [0]]))
    f(3).scatter(0, n([3]), 1.0)
    f(3).scatter_add(0, n([-1]), f(1))
    f(3).scatter_reduce(0, n([3]), f(1), "amax")
    f(3).index_select(0, n([-1]))
    f(3).index_add(0, n([3]), f(1))
    f(3).index_copy(0, n([3]), f(1))
    f(3).index_fill(0, n([3]), 1.0)
    f(3).index_put((n([3]),), f(1))
    f(3).take(n([3]))
    f(3).put(n([3]), f(1))
    f(3)[n([-4])]
    f(3).take_along_dim(n([3]))
    n([-1]).bincount()
    torch.multinomial(f(2) * 0, 1)
    torch.multinomial(f(2) * -1, 1, replacement=True)
    torch.bernoulli(f(2) * 1.5)
    torch.normal(f(2), -f(2))
    torch.poisson(-f(2))
    torch.binomial(f(1), f(1) * 1.5)
    torch.linalg.cholesky(-torch.eye(2, device=device))
    torch.linalg.inv(f(2, 2) * 0)
    torch.histc(f(2) * float("nan"), 3)
    torch.quantile(f(2), f(1) * 1.5)
    torch.repeat_interleave(f(2), n([-1, 1]))
    torch.segment_reduce(f(3), "sum", lengths=n([-1, 4]))
    F.max_unpool2d(f(1, 1, 1, 1), n([[[[99]]]]), 2)
    n([1]) // n([0])
    f(3).masked_scatter(n([1, 1, 1]).bool(), f(2))
""".strip().splitlines()


def _outcome(call: str, device: str) -> Any:
    names = {"F": F, "torch": torch, "device": device, "f": lambda *size: torch.ones(size, device=device),
             "n": lambda items: torch.tensor(items, dtype=torch.long, device=device)}
    try:
        found = eval(call, names)  # one of the lines above
        djinn.synchronize()
    except (RuntimeError, IndexError, ValueError) as error:
        # What a server's guard refuses in words of its own is an error of the same class.
        return type(error), str(error) if "one_hot" in call else ""
    return found.tolist()


@pytest.mark.parametrize("call", [call.strip() for call in _CALLS])
def test_bad_values_are_refused_as_in_eager(call: str) -> None:
    assert _outcome(call, "remote_accelerator") == _outcome(call, "cpu")


def test_an_encoding_of_a_given_number_of_classes_is_not_waited_for() -> None:
    classes = torch.randint(0, 3, (2, 4), device="remote_accelerator:0")
    before = djinn.stats()["round_trips"]
    encoded = torch.nn.functional.one_hot(classes, 5)
    assert (encoded.shape, encoded.stride()) == ((2, 4, 5), (20, 5, 1))
    assert djinn.stats()["round_trips"] == before
    assert torch.equal(encoded.cpu(), torch.nn.functional.one_hot(classes.cpu(), 5))
