"""The law of sessions about compiled modules on the device."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from djinn.session.session import Session
from djinn_conformance.assertions import expect_equal, expect_same_tensor
from djinn_conformance.compilations import Drawn, drawn_modules, seen_of_calls
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject

_ROWS = {"training": (4, 4, 4, 4, 6)}
_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad,
          "training": torch.enable_grad}


@law("session.compiled_recorded", effort=0.1 if is_thorough() else 0.06, shrinks=False)
@given(drawn=drawn_modules(), mode=st.sampled_from(sorted(_MODES)))
@example(drawn=Drawn(("counter", "attention", "dropout", "batch norm"), "view of the argument"), mode="no_grad")
@example(drawn=Drawn(("attention", "attention"), "twice"), mode="training")
@example(drawn=Drawn(("gelu", "greatest"), "apart"), mode="training")
@example(drawn=Drawn(("linear", "graph break", "constant", "noise"), "parts"), mode="inference_mode")
@example(drawn=Drawn(("running mean", "autocast"), "the argument written"), mode="no_grad")
@example(drawn=Drawn(("linear", "attention", "dropout", "batch norm"), "parts"), mode="training")
@example(drawn=Drawn(("graph break", "linear", "autocast", "noise"), "the last"), mode="training")
@example(drawn=Drawn(("counter", "linear", "norm", "greatest"), "apart"), mode="training")
def test_compiled_recorded(subject: Subject, session: Session, drawn: Drawn, mode: str) -> None:
    """Call a compiled module and the same one uncompiled, with arguments of several sizes."""
    where = f"{subject}: {drawn} under {mode}"
    seen: list[list[Any]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        module = drawn.made().to(session.device)
        call = torch.compile(module, backend="djinn", dynamic=False) if compiles else module
        rows, trains = _ROWS.get(mode, (4, 4, 6, 4)), mode == "training"
        seen.append(seen_of_calls(module, call, rows, session.device, _MODES[mode], trains=trains))
    torch._dynamo.reset()
    wanted, got = seen
    expect_equal(len(got), len(wanted), "count of results", where)
    for position, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if isinstance(theirs, torch.Tensor):
            expect_same_tensor(mine, theirs, f"value {position}", where)
        else:
            expect_equal(mine, theirs, f"value {position}", where)
