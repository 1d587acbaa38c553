"""PyTorch as its users know it, on a guarded server in another process; what a guard refuses, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import djinn


@pytest.fixture(scope="module", autouse=True)
def served(on_a_server: None) -> None:
    """Lets every session of these tests be one on the server that tests share, unless a test asks for another."""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the sessions of a test have their executor in this process, where no guard stands."""
    djinn.shutdown()
    with monkeypatch.context() as patch:
        patch.delenv("DJINN_SERVER")
        yield
        djinn.shutdown()
