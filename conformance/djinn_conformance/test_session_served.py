"""The law of servers: on a guarded server, an operator has the same results as in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.session.connecting import connect
from djinn.session.session import Session
from djinn_conformance.assertions import expect_equal, expect_same_tensor, expect_same_value
from djinn_conformance.families import OperatorSpec
from djinn_conformance.family_groups import Group, groups
from djinn_conformance.family_strategies import call_batches
from djinn_conformance.harness import other_connections
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.programs import Recording
from djinn_conformance.refusals import is_overlap_error, is_refused_call, runnable
from djinn_conformance.replays import MODES, Attempt, attempt_lazily
from djinn_conformance.subjects import Subject

_EFFORT = 0.15 if is_thorough() else 0.01
_HERE = ""
"""The address of an executor in this process, which has no guard."""


@law("session.served_equals_local", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.served_equals_local"), ids=str)
@given(data=st.data(), mode=st.sampled_from(MODES))
def test_served_equals_local(
    subject: Subject, session: Session, group: Group, data: st.DataObject, mode: str
) -> None:
    """Call each operator of a group without a guard in this process, and on the server."""
    operators = runnable(subject, group.operators)
    batch = list(zip(operators, data.draw(call_batches(operators)), strict=True))
    with _in_this_process(session):
        wanted = [_home(session, spec, recording, mode) for spec, recording in batch]
    for (spec, recording), here in zip(batch, wanted, strict=True):
        there = _home(session, spec, recording, mode)
        if not (is_overlap_error(there.error) and is_refused_call(subject, recording)):
            _compare(spec, here, there, f"{subject}: {mode}: {recording}")


@contextmanager
def _in_this_process(session: Session) -> Iterator[None]:
    """Give a running session an executor in this process for a block. Tensors of the block must be gone at its end."""
    with other_connections(session, lambda: [connect(session.plugins, _HERE)]):
        try:
            yield
        finally:
            gc.collect(0)


def _home(session: Session, spec: OperatorSpec, recording: Recording, mode: str) -> Attempt:
    """Make one call, and fetch its results."""
    session.seed(0)
    got = attempt_lazily(recording, session, mode)
    if got.error is not None:
        return got
    try:
        local = session.materialize(list(got.results))
    except Exception as error:  # noqa: BLE001  # any exception is the outcome that is compared
        return Attempt((), error)
    return Attempt(tuple(local))


def _compare(spec: OperatorSpec, here: Attempt, there: Attempt, where: str) -> None:
    __tracebackhide__ = True
    kinds = [type(outcome.error).__name__ if outcome.error is not None else "a result" for outcome in (there, here)]
    expect_equal(kinds[0], kinds[1], f"what {spec} gives on the server ({there.error})", where)
    if spec.undefined:
        return
    for index, (mine, theirs) in enumerate(zip(there.results, here.results, strict=True)):
        if isinstance(theirs, torch.Tensor):
            expect_same_tensor(mine, theirs, f"result {index} of {spec}", where, spec.tolerance)
        else:
            expect_same_value(mine, theirs, f"result {index} of {spec}", where)
