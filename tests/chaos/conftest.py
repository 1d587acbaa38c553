"""What came of breaking things is told on the screen, and kept for docs/reliability.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.reports import reliability


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Say what was done and what came of it; ``nox -s chaos`` publishes that."""

    def told(done: str, found: str) -> None:
        print(f"\n{done}: {found}")
        if kept := os.environ.get("DJINN_CHAOS_RESULTS"):
            name = request.node.nodeid.rpartition("/")[2].removeprefix("chaos_")
            reliability.keep(Path(kept), reliability.Found.now(name, done, found))

    return told
