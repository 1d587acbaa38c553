"""A plugin of pytest's: ``--one-of N`` runs about one test of N, the same ones on each device and in each run.

Tests are chosen by a checksum of their names without the device, so nobody chooses them by what comes of them.
"""

from __future__ import annotations

import re
import zlib

import pytest

_DEVICE_IN_NAME = re.compile(r"^(.*)_(cpu|privateuse1|remote_accelerator)(?=_|$)")
_DEVICE_IN_CLASS = re.compile(r"(CPU|PRIVATEUSE1|REMOTE_ACCELERATOR)$")


def named(test_class: str, name: str) -> str:
    """Name a test without the device that it is made for; tests that are not made for each device have no name."""
    if not _DEVICE_IN_CLASS.search(test_class):
        return ""
    return _DEVICE_IN_CLASS.sub("", test_class) + "." + _DEVICE_IN_NAME.sub(r"\1", name)


def is_chosen(test: str, one_of: int) -> bool:
    """Whether a test is among those that run, by its name without the device."""
    return zlib.crc32(test.encode()) % one_of == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--one-of", type=int, default=1, help="run about one test of so many, chosen by their names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other tests."""
    one_of = config.getoption("one_of")

    def test_of(item: pytest.Item) -> str:
        test_class = item.parent.name if item.parent is not None else ""
        return named(test_class, item.name) or f"{test_class}.{item.name}"

    kept = [item for item in items if is_chosen(test_of(item), one_of)]
    left_out = set(items) - set(kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
    items[:] = kept
