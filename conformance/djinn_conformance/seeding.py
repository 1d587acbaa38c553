"""Seeds and samples without what PyTorch notes of each in case its own tests fail, which takes longer than they do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

__all__ = ("quietly", "undisturbed")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Work `quietly`; what PyTorch draws afterwards is what it would have drawn."""
    state = torch.get_rng_state()
    try:
        with quietly():
            yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore warnings, seed no device that is not there, and look for no running test of PyTorch's own.

    ``torch.manual_seed`` keeps the text of the whole stack for each kind of device that may be initialized later, and
    the databases of samples look through the modules of the whole stack for a `unittest.TestCase` before each sample.
    What is drawn is the same without either.
    """
    from torch.testing._internal import common_utils

    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(common_utils, "extract_test_fn", _nothing))
        for module in (torch.cuda, torch.xpu, torch.mtia):
            if not module.is_available():
                changed.enter_context(mock.patch.object(module, "manual_seed_all", _nothing))
        changed.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _nothing(*_: object) -> None:
    """Stand in for a function whose result nobody uses."""
