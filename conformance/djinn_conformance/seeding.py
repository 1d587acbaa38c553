"""Faster seeds and samples: without the diagnostics that PyTorch records for its own failing tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

__all__ = ("quietly", "undisturbed", "without_stacks")


def without_stacks() -> None:
    """Let ``torch.manual_seed`` store no stack, for the rest of the process.

    It stores the text of the whole stack for each kind of device that may be initialized later, for messages of errors
    of that device. Within a test of Hypothesis that takes 0.6 ms of processor time, forty times as long as the rest.
    """
    nothing = SimpleNamespace(format_stack=list)
    for module in (torch.cuda, torch.xpu, torch.mtia):
        if hasattr(module, "traceback"):
            setattr(module, "traceback", nothing)  # noqa: B010  # no public attribute, for a type checker


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block `quietly`, without changing what PyTorch draws afterwards."""
    state = torch.get_rng_state()
    try:
        with quietly():
            yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore warnings, skip seeding devices that do not exist, and skip the search for PyTorch's running test.

    ``torch.manual_seed`` keeps each seed for kinds of devices that may be initialized later, and the databases of
    samples search the modules of the whole stack for a `unittest.TestCase` before each sample. Both cost time and do
    not affect the drawn values.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    with ExitStack() as changed:
        for module in (common_utils, core):
            # Not every release searches in both.
            if hasattr(module, "extract_test_fn"):
                changed.enter_context(mock.patch.object(module, "extract_test_fn", _nothing))
        for module in (torch.cuda, torch.xpu, torch.mtia):
            # PyTorch 2.10 seeds no MTIA.
            if not module.is_available() and hasattr(module, "manual_seed_all"):
                changed.enter_context(mock.patch.object(module, "manual_seed_all", _nothing))
        changed.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _nothing(*_: object) -> None:
    """Replace a function whose result is not used."""
