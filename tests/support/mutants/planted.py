"""Plants a fault of a server in a process of pytest: ``pytest -p support.mutants.planted --mutant NAME TEST ...``.

Servers that tests start in processes of their own have it, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.mutants.planting import plant
from support.mutants.serving import MUTANTS
from support.servers import serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", required=True, metavar="NAME", help="Plant this fault.")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Before fixtures take over the program of servers."""
    name = early_config.known_args_namespace.mutant
    serving.PROGRAM = f"from support.mutants.planted import plant_named; plant_named({name!r})\n{serving.PROGRAM}"
    yield


def pytest_configure(config: pytest.Config) -> None:
    plant_named(config.option.mutant)


def plant_named(name: str) -> None:
    """Plant the fault of a name."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    plant(mutant)
