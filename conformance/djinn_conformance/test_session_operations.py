"""Laws of sessions about operators, for every overload of the families in ``specs/ops``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.kinds import OutputSpec
from djinn.session.session import Session
from djinn_conformance.derivatives import derivatives, derivatives_remotely, differentiable
from djinn_conformance.families import OperatorSpec
from djinn_conformance.family_groups import Group, groups
from djinn_conformance.family_strategies import call_batches
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.programs import Recording
from djinn_conformance.refusals import is_overlap_error, is_refused_call, runnable
from djinn_conformance.replays import (
    MODES,
    Attempt,
    attempt_eager,
    attempt_lazily,
    compare_all,
    expect_metadata,
    expect_same_error,
    unflushed,
)
from djinn_conformance.subjects import Subject
from djinn_conformance.variants import variant_calls, variants_of

_EFFORT = 0.15 if is_thorough() else 0.02
"""A fraction of the examples is enough: each one calls every operator of a group."""
_MODES = st.sampled_from(MODES)


def _compare_batch(
    subject: Subject,
    session: Session,
    batch: Sequence[tuple[OperatorSpec, Recording]],
    eagerly: Callable[[Recording], Attempt],
    remotely: Callable[[Recording, bool], Attempt],
    mode: str = "",
) -> None:
    """Make each call of a batch locally and remotely, and fetch all results at once."""
    where = f"{subject}: {mode}" if mode else str(subject)
    pairs: list[tuple[str, Any, Any, Any]] = []
    for spec, recording in batch:
        place = f"{where}, {spec.family}: {recording}"
        wanted = eagerly(recording)
        if spec.is_random:
            session.seed(0)
        may_refuse = is_refused_call(subject, recording)
        got = remotely(recording, wanted.error is not None or may_refuse)
        if may_refuse and is_overlap_error(got.error):
            continue
        if wanted.error is not None:
            expect_same_error(got.error, wanted.error, repr(spec), place)
            continue
        if got.error is not None:
            raise AssertionError(f"{spec}: got {type(got.error).__name__}: {got.error}, should be a result [{place}]"
                                 ) from got.error
        named = [(f"result {index} of {place}", mine, theirs, spec.tolerance)
                 for index, (mine, theirs) in enumerate(zip(got.results, wanted.results, strict=True))]
        compare_all(session, named, where=place, elements=False)
        pairs += [] if spec.undefined else named
    compare_all(session, pairs, where=where)


@law("session.operations_equal", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.operations_equal"), ids=str)
@given(data=st.data(), mode=_MODES)
def test_operations_equal(subject: Subject, session: Session, group: Group, data: st.DataObject, mode: str) -> None:
    """Call each operator of a group on separate arguments."""
    operators = runnable(subject, group.operators)
    batch = list(zip(operators, data.draw(call_batches(operators)), strict=True))
    _compare_batch(subject, session, batch, lambda recording: attempt_eager(recording, mode),
                   lambda recording, raises: attempt_lazily(recording, session, mode, must_raise=raises), mode)


@law("session.specs_inferred", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.specs_inferred"), ids=str)
@given(data=st.data())
def test_specs_inferred(subject: Subject, session: Session, group: Group, data: st.DataObject) -> None:
    """Read metadata before anything has run, and compare it with the executor's afterwards."""
    told: list[tuple[str, torch.Tensor, OutputSpec]] = []
    operators = runnable(subject, group.operators)
    with unflushed(session):
        for spec, recording in zip(operators, data.draw(call_batches(operators)), strict=True):
            if attempt_eager(recording).error is None and not is_refused_call(subject, recording):
                got = attempt_lazily(recording, session)
                told += [(f"result {index} of {spec.family}: {recording}", result, OutputSpec.of(result))
                         for index, result in enumerate(got.results) if isinstance(result, torch.Tensor)]
        expect_metadata(session, told, str(subject))


@law("session.variants_equal", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.variants_equal", variants_of), ids=str)
@given(data=st.data())
def test_variants_equal(subject: Subject, session: Session, group: Group, data: st.DataObject) -> None:
    """Write to arguments and to destinations of every kind."""
    operators = runnable(subject, group.operators)
    drawn = data.draw(st.tuples(*(variant_calls(spec) for spec in operators)))
    _compare_batch(subject, session, list(zip(operators, drawn, strict=True)), attempt_eager,
                   lambda recording, raises: attempt_lazily(recording, session, must_raise=raises))


def _compare_derivatives(
    subject: Subject, session: Session, group: Group, data: st.DataObject, order: int, seed: int
) -> None:
    operators = runnable(subject, group.operators)
    _compare_batch(
        subject, session, list(zip(operators, data.draw(call_batches(operators)), strict=True)),
        lambda recording: derivatives(recording, order, seed),
        lambda recording, raises: derivatives_remotely(recording, session, order, seed, must_raise=raises))


@law("session.gradients_equal", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.gradients_equal", differentiable), ids=str)
@given(data=st.data(), seed=st.integers(0, 99))
def test_gradients_equal(subject: Subject, session: Session, group: Group, data: st.DataObject, seed: int) -> None:
    """Differentiate each operator of a group once."""
    _compare_derivatives(subject, session, group, data, 1, seed)


@law("session.second_gradients_equal", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.second_gradients_equal", differentiable), ids=str)
@given(data=st.data(), seed=st.integers(0, 99))
def test_second_gradients_equal(
    subject: Subject, session: Session, group: Group, data: st.DataObject, seed: int
) -> None:
    """Differentiate each operator of a group twice."""
    _compare_derivatives(subject, session, group, data, 2, seed)
