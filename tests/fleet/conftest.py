"""Sessions with several executors in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import djinn
from djinn.session.session import Session
from djinn_conformance.random_placement import scatter


@pytest.fixture
def explicit() -> Iterator[Session]:
    """Two executors in this process, each a device."""
    yield djinn.init(servers=["local://", "local://"], placement="explicit")
    djinn.shutdown()


@pytest.fixture
def scattered() -> Iterator[Session]:
    """Three executors in this process that are one device, with operations all over the place."""
    session = djinn.init(servers=["local://"] * 3, placement="automatic")
    scatter(session, 0)
    yield session
    djinn.shutdown()
