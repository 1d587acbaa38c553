"""Laws of sessions about whole programs of the operators in ``specs/ops``: aliases, replay, slices, lifetimes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.record.tensor import LazyTensor
from djinn.session.session import Session
from djinn_conformance.assertions import Tolerance, expect_equal, expect_same_tensor
from djinn_conformance.crashes import handing_over_each, let_die, recovering
from djinn_conformance.families import OperatorSpec, specs_of
from djinn_conformance.family_groups import Group, groups
from djinn_conformance.family_strategies import programs
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.refusals import refused_calls, runnable
from djinn_conformance.replays import compare_all, run_program, unflushed
from djinn_conformance.subjects import Subject
from djinn_conformance.wire_replays import expect_freed, replayed, written_down

_CPU = torch.device("cpu")
_EFFORT = 0.15 if is_thorough() else 0.02
_WRITES = specs_of("session.aliases_seen", "in_place")
_RANDOM = specs_of("session.slices_equal", "random")


def _named(index: int, where: str) -> str:
    return f"{f'result r{index}' if index >= 0 else f'input i{-1 - index}'} of {where}"


def _defined(subject: Subject, group: Group) -> list[OperatorSpec]:
    """List the operators of a group with deterministic results."""
    return [spec for spec in runnable(subject, group.operators) if not spec.undefined]


def _pairs(got: dict[int, Any], wanted: dict[int, Any], where: str) -> list[tuple[str, Any, Any, Any]]:
    return [(_named(index, where), got[index], wanted[index], {}) for index in sorted(wanted)]


@law("session.aliases_seen", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.aliases_seen"), ids=str)
@given(data=st.data())
def test_aliases_seen(subject: Subject, session: Session, group: Group, data: st.DataObject) -> None:
    """Take views of views, write through them, and check everything after each write."""
    recording = data.draw(programs(runnable(subject, group.operators), favoured=_WRITES, max_calls=8,
                                   leaves_out=refused_calls(subject)))
    here, there = (run_program(recording, device, watches=True) for device in (_CPU, session.device))
    where = f"{subject}: {recording}"
    seen: list[tuple[str, Any, Any, Any]] = [(f"a value after a write of {where}", mine, theirs, {})
            for mine, theirs in zip(there.seen, here.seen, strict=True)]
    compare_all(session, seen + _pairs(there.values, here.values, where), where=where)


@law("session.programs_replay", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.programs_replay"), ids=str)
@given(data=st.data())
def test_programs_replay(subject: Subject, session: Session, group: Group, data: st.DataObject) -> None:
    """Encode and decode a recorded program, and run it three times: new, known and compiled."""
    recording = data.draw(programs(_defined(subject, group), max_calls=6, leaves_out=refused_calls(subject)))
    where = f"{subject}: {recording}"
    wanted = run_program(recording, _CPU).values
    with unflushed(session):
        session.seed(0)
        written = written_down(recording, session)
    for number, values in enumerate(replayed(written, session, 3, where), 1):
        for index, value in values.items():
            should = wanted[index].resolve_conj().resolve_neg()
            expect_same_tensor(value, should, f"run {number}, {_named(index, where)}", where, group.tolerance)


@law("session.slices_equal", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.slices_equal"), ids=str)
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_slices_equal(subject: Subject, session: Session, group: Group, data: st.DataObject, order: Any) -> None:
    """Fetch and delete a program's values in any order, while nothing else submits operations."""
    recording = data.draw(programs(_defined(subject, group), favoured=_WRITES[:8] + _RANDOM[:4], max_calls=8,
                                   leaves_out=refused_calls(subject)))
    wanted = run_program(recording, _CPU).values
    indices = sorted(wanted)
    order.shuffle(indices)
    where = f"{subject}: {recording} in the order {indices}"
    with unflushed(session):
        session.seed(0)
        got = run_program(recording, session.device).values
        for index in indices:
            compare_all(session, [(_named(index, where), got.pop(index), wanted[index], group.tolerance)], where=where)


@law("session.recovery_exact", effort=_EFFORT / 2, shrinks=False)
@pytest.mark.parametrize("group", groups("session.slices_equal"), ids=str)
@given(data=st.data(), messages=st.integers(0, 12), checkpoints=st.booleans())
def test_recovery_exact(
    subject: Subject, session: Session, group: Group, data: st.DataObject, messages: int, checkpoints: bool
) -> None:
    """Let the server die within a program whose operations are submitted one by one, and again before it is read."""
    recording = data.draw(programs(_defined(subject, group), favoured=_WRITES[:8] + _RANDOM[:4], max_calls=8,
                                   leaves_out=refused_calls(subject)))
    wanted = run_program(recording, _CPU).values
    where = f"{subject}: {recording}, death after {messages} messages"
    with recovering(session) as layer, handing_over_each(session):
        session.seed(0)
        let_die(session, messages)
        got = run_program(recording, session.device).values
        session.synchronize()
        with session.lock:
            if checkpoints:
                layer.checkpoint()
            layer.journal.compact()
        let_die(session)
        compare_all(session, _tolerant_pairs(got, wanted, where, group.tolerance), where=where)
        got.clear()
        gc.collect(0)
        session.flush()


def _tolerant_pairs(
    got: dict[int, Any], wanted: dict[int, Any], where: str, tolerance: Tolerance
) -> list[tuple[str, Any, Any, Tolerance | None]]:
    return [(what, mine, theirs, tolerance) for what, mine, theirs, _ in _pairs(got, wanted, where)]


def _settled(session: Session) -> int:
    """Count the handles held once nothing is pending."""
    session.synchronize()
    return session.stats()["live_handles"]


@law("session.handles_freed", effort=_EFFORT, shrinks=False)
@pytest.mark.parametrize("group", groups("session.handles_freed"), ids=str)
@given(data=st.data(), home=st.booleans(), waits=st.booleans())
def test_handles_freed(
    subject: Subject, session: Session, group: Group, data: st.DataObject, home: bool, waits: bool
) -> None:
    """Drop all tensors of a program, after fetching some of them, computing all of them, or neither."""
    recording = data.draw(programs(runnable(subject, group.operators), favoured=_WRITES, max_calls=8,
                                   leaves_out=refused_calls(subject)))
    where = f"{subject}: {recording}"
    # Garbage of an earlier program must not be counted as freed by this one.
    gc.disable()
    try:
        before = _settled(session)
        values = run_program(recording, session.device).values
        handles = [value._value.slot.number for value in values.values() if isinstance(value, LazyTensor)]
        if home:
            session.materialize(list(values.values())[:2])
        if waits:
            session.synchronize()
        values.clear()
        expect_equal(_settled(session), before, "live handles", where)
        expect_freed(session, handles, where)
    finally:
        gc.enable()
