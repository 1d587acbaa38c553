"""What PyTorch does, these tests see done by a guarded server in another process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _served(on_a_server: None) -> None:
    """Start sessions on the shared server."""
