"""Laws of interceptors. The effects are observed in a separate process: see `djinn_conformance.local_life`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from djinn_conformance import local_life
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject


@pytest.fixture
def seen(subject: Subject) -> dict[str, Any]:
    """The observed effects of the interceptor; observed once."""
    return _observe(subject.registered.name)


@cache
def _observe(name: str) -> dict[str, Any]:
    return local_life.observe(name)


@law("interceptor.local_unchanged")
def test_local_unchanged(subject: Subject, seen: dict[str, Any]) -> None:
    """Compare local actions before and after installation."""
    for name, wanted in seen["before"].items():
        expect_equal(seen["once"][name], wanted, f"{name} after installation", str(subject))
    expect_equal(seen["changed"]["state of the generators"], False, "change of random generators", str(subject))


@law("interceptor.idempotent")
def test_idempotent(subject: Subject, seen: dict[str, Any]) -> None:
    """Install twice."""
    first, second = seen["devices"]
    expect_equal(second, first, "device of the second installation", str(subject))
    for name, wanted in seen["once"].items():
        expect_equal(seen["twice"][name], wanted, f"{name} after a second installation", str(subject))


@law("interceptor.opens_nothing")
def test_opens_nothing(subject: Subject, seen: dict[str, Any]) -> None:
    """Check threads, processes and sockets."""
    expect_equal(seen["opened"], [], "sockets and processes opened by installation", str(subject))
    for name in ("threads", "native threads"):
        expect_equal(seen["changed"][name], 0, f"{name} started by installation", str(subject))
    expect_equal(seen["changed"]["session running"], False, "session started by local actions", str(subject))


@law("interceptor.device_real")
def test_device_real(subject: Subject, seen: dict[str, Any]) -> None:
    """Parse the device's text."""
    expect_equal(seen["is_device"], True, "being a torch.device", str(subject))
    expect_equal(seen["parsed"], seen["devices"][0], "device parsed from its text", str(subject))
    expect(":" in seen["devices"][0], "device", got=seen["devices"][0], wanted="one with an index", where=str(subject))


@law("interceptor.operations_arrive")
def test_operations_arrive(subject: Subject, seen: dict[str, Any]) -> None:
    """Run the same lines on the device and on the CPU."""
    for name, (got, wanted) in seen["arrivals"].items():
        expect_equal(got, wanted, f"outcome of {name}", f"{subject} on {seen['devices'][0]}")


@law("interceptor.fakes_real")
def test_fakes_real(subject: Subject, seen: dict[str, Any]) -> None:
    """Run the same lines on fake tensors of the device and of the CPU."""
    for name, (got, wanted) in seen["fakes"].items():
        expect_equal(got, wanted, f"outcome of {name}", f"{subject} on {seen['devices'][0]}")
