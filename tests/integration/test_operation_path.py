"""The path of one operation, as docs/architecture.md draws it: no file gets the call a second time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import djinn

ROOT = Path(__file__).parents[2]
DEVICE = "remote_accelerator:0"


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    djinn.init(device="cpu", flush_every=None)
    yield
    djinn.shutdown()


def files_entered(call: Callable[[], Any]) -> list[str]:
    """List the files of djinn that the arguments of an operation enter from another one, in order."""
    entered: list[str] = []

    def file_of(frame: FrameType | None) -> str:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "djinn") or path.is_relative_to(ROOT / "plugins"):
                return str(path.relative_to(ROOT))
            if path == Path(__file__):
                break
            frame = frame.f_back
        return ""

    def watch(frame: FrameType, event: str, _: Any) -> None:
        takes = frame.f_code.co_varnames[:frame.f_code.co_argcount]
        if event == "call" and "args" in takes and file_of(frame) not in ("", file_of(frame.f_back)):
            entered.append(file_of(frame))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("is_known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(("needs_gradient", "path"), [
    (True, ["djinn/record/tensor.py", "plugins/djinn_plugins/device/interceptor/fast_path.py",
            "plugins/djinn_plugins/device/interceptor/functions.py",
            "plugins/djinn_plugins/device/interceptor/gradients.py",
            "djinn/record/dispatcher.py", "djinn/record/recorder.py"]),
    (False, ["djinn/record/tensor.py", "plugins/djinn_plugins/device/interceptor/fast_path.py",
             "djinn/record/recorder.py"]),
])
def test_a_product_enters_no_file_twice(needs_gradient: bool, path: list[str], is_known: bool) -> None:
    x = torch.ones(3, 4, device=DEVICE)
    w = torch.ones(4, 5, device=DEVICE, requires_grad=needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        for _ in range(3 if is_known else 0):
            x @ w
        entered = files_entered(lambda: x @ w)
    assert len(set(entered)) == len(entered), entered
    # A known product without gradients is recorded by the tensor's method.
    assert [file for file in entered if file in path] == path[0 if needs_gradient or not is_known else -1:]
    if is_known:
        assert not set(entered) & {"djinn/record/call_plans.py", "djinn/session/session.py"}
