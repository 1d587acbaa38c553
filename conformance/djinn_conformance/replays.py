"""Recorded calls, executed on the remote device and in this process, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch

from djinn.kinds import OutputSpec
from djinn.record.tensor import LazyTensor
from djinn.session.session import Session
from djinn.wire.messages import Description
from djinn.wire.tensors import dtype_named
from djinn_conformance.assertions import (
    Tolerance,
    expect,
    expect_equal,
    expect_same_spec,
    expect_same_tensor,
    expect_same_value,
    violated,
)
from djinn_conformance.oracle import copied, perform, seeded
from djinn_conformance.programs import RecordedCall, Recording, written_refs

__all__ = ("MODES", "Attempt", "attempt_eager", "attempt_lazily", "compare_all", "expect_metadata", "expect_same_error",
           "mode_named", "run_program", "unflushed")

MODES = ("gradients", "no_grad", "inference")
"""The modes in which operations are called."""
_CPU = torch.device("cpu")


def mode_named(name: str) -> AbstractContextManager[None]:
    """Create the context of one of `MODES`."""
    made: Mapping[str, AbstractContextManager[Any]] = {
        "gradients": nullcontext(), "no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    return made[name]


@attrs.frozen
class Attempt:
    """The outcome of one call.

    Attributes:
        results: New results, followed by the arguments that it has written.
        error: The exception, if it raised.
    """

    results: tuple[Any, ...]
    error: Exception | None = None


def _attempt(calls: Sequence[RecordedCall], inputs: Sequence[torch.Tensor], device: torch.device) -> Attempt:
    """Make the preparing calls and then the tested one."""
    values = {-1 - index: tensor for index, tensor in enumerate(inputs)}
    for index, made in enumerate(calls[:-1]):
        [values[index]] = perform(made, values, device)
    try:
        results = perform(calls[-1], values, device)
    except Exception as error:  # noqa: BLE001  # any exception is the outcome that is compared
        return Attempt((), error)
    return Attempt((*results, *(values[ref.index] for ref in written_refs(calls[-1]))))


def attempt_eager(recording: Recording, mode: str = "gradients", seed: int = 0) -> Attempt:
    """Execute a call in this process, on copies of its inputs; the calls before it, views of a tensor, prepare it."""
    inputs = [copied(tensor, _CPU) for tensor in recording.inputs]
    with seeded(_CPU, seed), mode_named(mode):
        return _attempt(recording.calls, inputs, _CPU)


def attempt_lazily(
    recording: Recording, session: Session, mode: str = "gradients", *, must_raise: bool = False
) -> Attempt:
    """Execute a call remotely, as `attempt_eager` does locally.

    Args:
        recording: The call, and those that prepare it.
        session: The running session.
        mode: One of `MODES`.
        must_raise: Whether eager raises; in that case, wait for an exception that only execution reveals.
    """
    inputs = [copied(tensor, session.device) for tensor in recording.inputs]
    with mode_named(mode):
        attempt = _attempt(recording.calls, inputs, session.device)
    if not must_raise or attempt.error is not None:
        return attempt
    try:
        session.synchronize()
    except Exception as error:  # noqa: BLE001  # as above
        return Attempt((), error)
    return attempt


@attrs.frozen
class Ran:
    """The results of a program.

    Attributes:
        values: By index, including inputs, in their final state.
        seen: Copies of all values after each call that wrote something, if requested.
    """

    values: dict[int, Any]
    seen: list[Any]


def run_program(recording: Recording, device: torch.device, *, watches: bool = False) -> Ran:
    """Run a program on a device; none of its calls may raise.

    Args:
        recording: The program.
        device: The CPU, or the remote device.
        watches: Whether to copy all values after each call that writes something.
    """
    ran = Ran({-1 - index: copied(tensor, device) for index, tensor in enumerate(recording.inputs)}, [])
    produced = 0
    with torch.no_grad(), seeded(_CPU, 0):
        for made in recording.calls:
            for result in perform(made, ran.values, device):
                ran.values[produced] = result
                produced += 1
            if watches and written_refs(made):
                ran.seen.extend(value.clone() for value in ran.values.values() if isinstance(value, torch.Tensor))
    return ran


def compare_all(
    session: Session, pairs: Sequence[tuple[str, Any, Any, Tolerance | None]], *, where: str, elements: bool = True
) -> None:
    """Compare values of the session with eager's, fetching all of them at once.

    Args:
        session: The running session.
        pairs: For each comparison: the description, the session's value, eager's, and the tolerance.
        where: The case, for messages.
        elements: Whether to compare elements, not only metadata.
    """
    __tracebackhide__ = True
    for what, got, wanted, _ in pairs:
        if isinstance(wanted, torch.Tensor):
            expect(isinstance(got, LazyTensor), f"type of {what}", got=type(got).__name__, wanted="LazyTensor",
                   where=where)
            expect_same_spec(OutputSpec.of(got), OutputSpec.of(wanted), what, where)
    if not elements:
        return
    local = session.materialize([got for _, got, _, _ in pairs])
    for (what, _, wanted, tolerance), mine in zip(pairs, local, strict=True):
        if isinstance(wanted, torch.Tensor):
            should = wanted.detach().resolve_conj().resolve_neg()
            expect_same_tensor(mine, should, what, where, tolerance)
        else:
            expect_same_value(mine, wanted, what, where)


def expect_same_error(got: Exception | None, wanted: Exception, what: str, where: str) -> None:
    """Check that an exception has the same type as eager's."""
    __tracebackhide__ = True
    if got is None:
        violated(f"outcome of {what}", got="no exception", wanted=f"{type(wanted).__name__}: {wanted}", where=where)
    expect_equal(type(got).__name__, type(wanted).__name__, f"exception of {what} ({got})", where)


@contextmanager
def unflushed(session: Session) -> Iterator[None]:
    """Submit nothing before it is needed, as in a session with ``flush_every=None``."""
    session.flush()
    session.flush_after(None)
    try:
        yield
    finally:
        session.flush_after(session.config.flush_every)


def expect_metadata(session: Session, told: Sequence[tuple[str, torch.Tensor, OutputSpec]], where: str) -> None:
    """Run everything, and compare previously inferred metadata with the executor's."""
    __tracebackhide__ = True
    with session.lock:
        described = session.backend.describe([tensor._value.slot for _, tensor, _ in told])  # type: ignore[attr-defined]  # lazy tensors
    for (what, _, before), item in zip(told, described, strict=True):
        expect(isinstance(item, Description), f"description of {what}", got=item, wanted="metadata", where=where)
        expect_same_spec(before, OutputSpec(torch.Size(item.size), item.stride, item.storage_offset,
                                            dtype_named(item.dtype)), what, where)
