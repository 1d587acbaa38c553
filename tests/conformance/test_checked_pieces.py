"""A program that is checked between its pieces runs as it does whole, for an executor that checks no calls itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
LAWS = ("equals_eager", "failure_contained", "poison_propagates", "randomness_private", "replay_stable",
        "stops_between_steps", "unknown_operator_named", "order_kept")
PLUGIN = """
from djinn.hookspecs import hookimpl

@hookimpl
def djinn_register_executors(register):
    from support.servers.least_executor import PieceFactory
    register(PieceFactory())
"""


def test_pieces_keep_the_laws_of_executors(kit: Any) -> None:
    kit.install("acme-executor-pieces", "acme_executor_pieces", PLUGIN)
    outcome = kit.run("--djinn-plugin=executor:acme-executor-pieces", "-k", " or ".join(LAWS), package=TESTS)
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert re.search(rf"{len(LAWS)} laws kept +0 broken", outcome.output), outcome.output
