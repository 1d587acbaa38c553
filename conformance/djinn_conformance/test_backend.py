"""Laws of backends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.errors import DjinnError
from djinn.session import runtime
from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor, violated
from djinn_conformance.chains import Chain, apply_chain, chains, given_matrices
from djinn_conformance.laws import law
from djinn_conformance.random_placement import scatter
from djinn_conformance.subjects import Subject
from djinn_plugins.schedule.placing import placing_of

_EXECUTORS = 2


@contextmanager
def _opened(subject: Subject) -> Iterator[Session]:
    """Start a session on executors in this process; if the backend lets others place operations, they run anywhere."""
    session = runtime.init(servers=["local://"] * _EXECUTORS, placement="automatic",
                           plugins=[f"backend={subject.registered.name}"])
    try:
        if placing_of(session.backend) is not None:
            scatter(session, 0)
        yield session
    finally:
        runtime.shutdown()


@pytest.fixture(scope="module")
def opened(subject: Subject) -> Iterator[Session]:
    """A session on the backend, which all examples share."""
    with _opened(subject) as session:
        yield session


def _moved(session: Session) -> list[torch.Tensor]:
    return [tensor.to(session.device) for tensor in given_matrices()]


@law("backend.results_equal")
@given(chain=chains())
def test_results_equal(subject: Subject, opened: Session, chain: Chain) -> None:
    """Run a program there and in eager, and compare every value."""
    wanted = apply_chain(chain, given_matrices())
    got = apply_chain(chain, _moved(opened))
    for index, (there, here) in enumerate(zip(got, wanted, strict=True)):
        expect_same_tensor(there.cpu(), here, f"value {index}", f"{subject}: {chain}")


@law("backend.tape_taken")
@given(chain=chains())
def test_tape_taken(subject: Subject, opened: Session, chain: Chain) -> None:
    """Flush with some values alive and others dropped."""
    kept = apply_chain(chain, _moved(opened))[-1]
    gc.collect(0)
    opened.flush()
    left = len(opened.tape), len(opened.released)
    expect_equal(left, (0, 0), "nodes on the tape and released values", f"{subject}: {chain}")
    del kept


@law("backend.values_freed", effort=0.5)
@given(chain=chains())
def test_values_freed(subject: Subject, opened: Session, chain: Chain) -> None:
    """Count the values before and after a program."""
    gc.collect()
    opened.synchronize()
    before = opened.stats()["live_handles"]
    apply_chain(chain, _moved(opened))[-1].sum().item()
    gc.collect()
    opened.synchronize()
    # What was released with the last message is freed by the next.
    opened.synchronize()
    expect_equal(opened.stats()["live_handles"], before, "values that executors hold", f"{subject}: {chain}")


@law("backend.failures_raised", effort=0.5)
@given(chain=chains(4), index=st.integers(-20, 20))
def test_failures_raised(subject: Subject, opened: Session, chain: Chain, index: int) -> None:
    """Index with a number that may be out of range, in the midst of a program."""

    def work(values: list[torch.Tensor], device: Any) -> Any:
        made = apply_chain(chain, values)
        try:
            return torch.index_select(made[-1], 0, torch.tensor([index], device=device)).cpu()
        except Exception as error:  # noqa: BLE001  # whatever eager raises is what is wanted
            return type(error)

    wanted = work(given_matrices(), "cpu")
    got = work(_moved(opened), opened.device)
    where = f"{subject}: {chain}, row {index}"
    if isinstance(wanted, type) or isinstance(got, type):
        expect_equal(got, wanted, "outcome", where)
    else:
        expect_same_tensor(got, wanted, "row", where)
    expect_equal((torch.ones(2, device=opened.device) + 1).tolist(), [2.0, 2.0], "the next result", where)


@law("backend.random_equal", effort=0.5)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_random_equal(subject: Subject, opened: Session, seed: int, lengths: list[int]) -> None:
    """Draw several times after seeding."""
    opened.seed(seed)
    drawn = [torch.rand(length, device=opened.device) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    for tensor, length in zip(drawn, lengths, strict=True):
        expect_same_tensor(tensor.cpu(), torch.rand(length, generator=generator), f"{length} numbers",
                           f"{subject}: seed {seed}")


@law("backend.executors_listed")
def test_executors_listed(subject: Subject) -> None:
    """Look at the executors of a new session."""
    session = runtime.init(servers=["local://"] * _EXECUTORS, placement="automatic",
                           plugins=[f"backend={subject.registered.name}"])
    try:
        backend = session.backend
        count = len(backend.executors)
        expect(1 <= count <= _EXECUTORS, "executors", got=count, wanted=f"from 1 to {_EXECUTORS}", where=f"{subject}")
        for executor in backend.executors:
            expect(bool(executor.address) and not executor.is_broken, "an executor", got=executor.address,
                   wanted="one with an open connection", where=f"{subject}")
        expect(backend.device_count >= 1, "device_count", got=backend.device_count, wanted="at least 1",
               where=f"{subject}")
    finally:
        runtime.shutdown()


@law("backend.closed_is_final")
def test_closed_is_final(subject: Subject) -> None:
    """Wait once more on a backend that is closed."""
    with _opened(subject) as session:
        backend = session.backend
        (torch.ones(3, device=session.device) + 1).cpu()
    try:
        backend.synchronize()
    except DjinnError:
        return
    violated("synchronize after close", got="no exception", wanted="a DjinnError", where=f"{subject}")
