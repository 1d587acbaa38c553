"""Plants a fault of a server in a process of pytest: ``pytest -p support.mutants.planted --mutant NAME TEST ...``."""

from __future__ import annotations

import pytest
from support.mutants.planting import plant
from support.mutants.serving import MUTANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", required=True, metavar="NAME", help="Plant this fault.")


def pytest_configure(config: pytest.Config) -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == config.option.mutant]
    plant(mutant)
