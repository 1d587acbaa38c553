"""The options of a server: one structure, from the command line to the workers."""

from __future__ import annotations

import math

import msgspec
import pytest

from djinn.errors import ConfigurationError
from djinn_plugins.server.checks import check_options
from djinn_plugins.server.control import ControlMessage, Setup
from djinn_plugins.server.options import SandboxMode, ServeOptions, declared, options_from
from djinn_plugins.server.tokens.authenticators import TokenAuthentication

MIB = 2**20


def test_options_of_the_command_line_become_attributes_in_the_units_of_the_program() -> None:
    options = options_from({
        "port": 7, "device": "cuda:0, cuda:1", "keep_mib": 3, "program_mib": None, "allow_namespace": ["mine"],
        "memory_mib": 5, "max_sessions": 0, "log_format": "json", "sandbox": SandboxMode.off, "tls_cert": "a.pem",
        "lease_s": 2, "with_parent": True})
    assert options.address.port == 7
    assert options.device.names == ("cuda:0", "cuda:1")
    assert options.device.namespaces == ("mine",)
    assert options.device.program_bytes is None
    assert options.memory.keep_bytes == 3 * MIB
    assert (options.limits.memory_bytes, options.limits.sessions, options.limits.programs) == (5 * MIB, 0, 4096)
    assert options.operator.log_format == "json"
    assert options.sandbox is SandboxMode.off
    assert options.tls.cert.startswith("/")
    assert isinstance(options.sessions.lease_s, float)
    assert options_from({}) == ServeOptions()


@pytest.mark.parametrize(("name", "value"), [
    ("port", 70000), ("max_sessions", -1), ("memory_warning", 2.0), ("lease_s", math.nan), ("max_run_s", math.inf),
    ("log_format", "xml"), ("threads", 0), ("device", None)])
def test_an_invalid_value_is_refused_by_the_name_of_its_option(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} cannot be"):
        options_from({name: value})


def test_each_option_sets_one_attribute() -> None:
    names = [each.option.name for each in declared()]
    assert len(set(names)) == len(names) > 30
    assert len({each.path for each in declared()}) == len(names)


def test_workers_get_all_options_but_the_clients_token() -> None:
    options = options_from({"token": "a secret", "tokens": "some.json", "keep_mib": 1, "allow_namespace": ["mine"]})
    assert "a secret" not in repr(options)
    sent = msgspec.msgpack.encode(Setup(options.without_token(), tenant="ann", device="cpu"))
    assert b"a secret" not in sent
    received = msgspec.msgpack.decode(sent, type=ControlMessage)
    assert isinstance(received, Setup)
    assert received.options == options.without_token() != options
    assert options_from({"token": ""}).without_token() == ServeOptions()


@pytest.mark.parametrize(("given", "said"), [
    ({"unix": "a.sock", "port": 1}, "--unix cannot be used"), ({"tls_key": "a.pem"}, "say nothing without --tls-cert"),
    ({"tokens": "a.json", "token": "b"}, "and a token for everybody"), ({"tokens": "/none.json"}, "There is no file"),
    ({"device": "cpu,"}, "is no list of devices"),
    ({"memory_warning": 0.9, "memory_critical": 0.8}, "--memory-warning"),
    ({"peers": "10.0.0.0/99"}, "--peers"), ({"host": "0.0.0.0"}, "nor a token"),
    ({"host": "0.0.0.0", "token": "b"}, "no encryption")])
def test_contradictory_or_unsafe_options_are_refused(given: dict[str, object], said: str) -> None:
    options = options_from(given)
    with pytest.raises(ConfigurationError, match=said):
        check_options(options, needs_token=TokenAuthentication().check(options))
