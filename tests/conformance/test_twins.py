"""Twins notice what is different, and pass over what docs/compatibility.md says is."""

from __future__ import annotations

import pytest
import torch

from djinn_conformance.differential import EagerLine, LineOutcome, eager_twin, remote_twin

PROGRAM = """
t1 = torch.ones(2, 3, device=device, requires_grad=True)
t2 = t1 * 2
t3 = t2[0]
t2.mul_(3)
"""


@pytest.mark.parametrize(("there", "here", "are_alike"), [
    ("tensor([0.],grad_fn=<SelectBackward0>)", "tensor([0.],grad_fn=<AsStridedBackward0>)", True),
    ("tensor([1.],grad_fn=<SelectBackward0>)", "tensor([0.],grad_fn=<AsStridedBackward0>)", False),
    ("tensor([0.])", "tensor([0.],grad_fn=<AsStridedBackward0>)", False),
    ("tensor([0.],grad_fn=<SelectBackward0>)", "tensor([0.],grad_fn=<ViewBackward0>)", False),
])
def test_a_view_that_is_taken_again_is_known_by_its_numbers(there: str, here: str, are_alike: bool) -> None:
    line = EagerLine("shown(t1)", "read", (), (), LineOutcome(None, here, ()))
    assert (eager_twin().take(line, LineOutcome(None, there, ())) == "") == are_alike


def test_what_a_view_of_a_written_base_looks_like() -> None:
    shown = []
    for twin in (eager_twin(), remote_twin(torch.device("remote_accelerator:0"))):
        exec(PROGRAM, twin.space)
        shown.append(twin.run("shown(t3)").plain)
    assert shown == [f"'tensor([6.,6.,6.],grad_fn=<{name}Backward0>)'" for name in ("AsStrided", "Select")]
