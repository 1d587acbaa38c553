"""Laws of sessions that train: PyTorch's own databases of optimizers and of modules, over several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch

from djinn.record import devices
from djinn.session.session import Session
from djinn_conformance import modules, optimizers
from djinn_conformance.compositions import is_second, session_of
from djinn_conformance.laws import active_profile, is_thorough, law
from djinn_conformance.subjects import Subject, torch_device
from djinn_conformance.training import Case, check_all

_TIMEOUT_S = 900
_ALL_EXAMPLES = 200
"""A profile with fewer examples runs fewer cases."""
_FEWER = 7
"""In this process, every this many of the cases that are run on a server."""


def _check(suite: str, cases: Callable[..., Iterator[Case]], subject: Subject) -> None:
    __tracebackhide__ = True
    device: torch.device = torch_device(subject)
    step = max(1, _ALL_EXAMPLES // active_profile().max_examples)
    if is_second(subject) and not is_thorough():
        step *= _FEWER
    chosen = islice(cases(device, thorough=is_thorough()), 0, None, step)
    check_all(suite, chosen, device, devices.logical_device(), session=session_of(subject), thorough=is_thorough())


@pytest.mark.timeout(_TIMEOUT_S)
@law("session.optimizers_equal")
def test_optimizers_equal(session: Session, subject: Subject) -> None:
    """Optimizers, and the tools commonly used with them."""
    _check("optimizers", optimizers.cases, subject)


@pytest.mark.timeout(_TIMEOUT_S)
@law("session.modules_equal")
def test_modules_equal(session: Session, subject: Subject) -> None:
    """Modules, in training and in evaluation."""
    _check("modules", modules.cases, subject)
