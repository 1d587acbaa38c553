"""Fixtures of the suites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from djinn.session.session import Session
from djinn_conformance.capabilities import missing
from djinn_conformance.compositions import running
from djinn_conformance.discovery import remember_distributions
from djinn_conformance.harness import InProcessServer
from djinn_conformance.laws import law_of
from djinn_conformance.seeding import without_stacks
from djinn_conformance.serving import Servers
from djinn_conformance.specs import law_named
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.executor import Executor

without_stacks()
remember_distributions()


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The subject of the test."""
    found: Subject = request.param
    return found


@pytest.fixture(scope="session")
def plugin(subject: Subject) -> Any:
    """The registered object itself."""
    return subject.registered.value


@pytest.fixture(scope="session")
def executor(subject: Subject) -> Iterator[Executor]:
    """An executor, opened on the subject's device."""
    if not subject.device:
        pytest.skip(f"the executor {subject.registered.name} has no device on this machine")
    opened: Executor = subject.registered.value.open(subject.device)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def place(subject: Subject) -> Iterator[InProcessServer]:
    """A server that a transport can connect to."""
    with InProcessServer(subject) as served:
        yield served
    assert not served.faults, f"the server's end met {served.faults}"


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Guarded servers in separate processes, shared by all sessions."""
    with Servers() as made:
        yield made


@pytest.fixture(scope="session")
def session(subject: Subject, servers: Servers) -> Iterator[Session]:
    """The running session that a subject of the kind ``session`` describes."""
    with running(subject, servers) as started:
        yield started


@pytest.fixture(autouse=True)
def _applicable(request: pytest.FixtureRequest, subject: Subject) -> None:
    """Skip a law that requires a capability which the plugin lacks."""
    law = law_of(request.function)
    lacking = missing(law_named(law), subject) if law else ()
    if lacking:
        pytest.skip(f"{law} requires {', '.join(lacking)}, which {subject} has not")
