"""The law of sessions about PyTorch's process-wide switches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from djinn.session.session import Session
from djinn_conformance.assertions import expect_equal, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.common.calls.switches import switches


@contextlib.contextmanager
def _determinism(mode: str) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def _unfilled() -> Iterator[None]:
    with _determinism("error"):
        filling: Any = torch.utils.deterministic
        filling.fill_uninitialized_memory = False
        try:
            yield
        finally:
            filling.fill_uninitialized_memory = True


@contextlib.contextmanager
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def _precision(word: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]  # missing in the stubs


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "defaults": contextlib.nullcontext,
    "deterministic": lambda: _determinism("error"),
    "unfilled": _unfilled,
    "flushing": _flushing,
    "medium": lambda: _precision("medium"),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "no cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
}


def _puts(device: torch.device) -> torch.Tensor:
    index = torch.tensor([0, 0], device=device)
    return torch.zeros(4, device=device).put_(index, torch.tensor([1.0, 2.0], device=device))


CALLS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "put": _puts,
    "empty": lambda device: torch.empty(500, device=device).isnan().all(),
    "denormal": lambda device: torch.full((3,), 1e-30, device=device) * 1e-10,
    "product": lambda device: torch.linspace(0, 1, 4096, device=device).view(64, 64) @ torch.linspace(
        1, 2, 4096, device=device).view(64, 64),
    "convolution": lambda device: torch.conv2d(torch.linspace(0, 1, 512, device=device).view(1, 2, 16, 16),
                                               torch.linspace(-1, 1, 72, device=device).view(4, 2, 3, 3)),
}
_BY_LUCK = {("empty", "defaults"), ("empty", "unfilled"), *(("empty", name) for name in SETTINGS if " " in name),
            ("empty", "flushing"), ("empty", "medium")}
"""Where the memory is left as it was."""


@law("session.switches_equal")
def test_switches_equal(subject: Subject, session: Session) -> None:
    """Record calls under each switch, in turn, and let them run at once, or when the switch is back."""
    before = switches()
    for waits in (False, True, False):
        for setting, enter in SETTINGS.items():
            for name, call in CALLS.items():
                with enter(), torch.no_grad():
                    wanted = _outcome(call, torch.device("cpu"))
                    got = call(session.device) if waits else _outcome(call, session.device)
                if isinstance(got, torch.Tensor):
                    got = _outcome(got.to, torch.device("cpu"))
                where = f"{subject}: {name}, {setting}, {waits}"
                if (name, setting) not in _BY_LUCK:
                    _compare(got, wanted, where)
                expect_equal(switches(), before, "the switches of this process afterwards", where)


def _outcome(call: Callable[[torch.device], torch.Tensor], device: torch.device) -> torch.Tensor | str:
    """Return the values of a call's result, or what the error says."""
    try:
        return call(device).cpu()
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def _compare(got: torch.Tensor | str, wanted: torch.Tensor | str, where: str) -> None:
    __tracebackhide__ = True
    if isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor):
        expect_same_tensor(got, wanted, "the result", where)
    else:
        expect_equal(got, wanted, "the result", where)
