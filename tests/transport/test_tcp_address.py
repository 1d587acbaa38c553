"""Addresses of the transports over sockets."""

from __future__ import annotations

import pytest

from djinn.errors import ConfigurationError
from djinn_plugins.common.net.urls import url_of
from djinn_plugins.transport.tcp.address import MAX_PATH_BYTES, parse_address, parse_path
from djinn_plugins.transport.tcp.greeting import check_token


@pytest.mark.parametrize(("address", "host", "port"), [
    ("tcp://127.0.0.1:7070", "127.0.0.1", 7070),
    ("tcp://[::1]:1", "::1", 1),
    ("tcp://[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ("tcp://gpu.example.org:7070/", "gpu.example.org", 7070),
])
def test_addresses(address: str, host: str, port: int) -> None:
    assert parse_address(address) == (host, port)
    assert url_of("tcp", host, port) == address.rstrip("/")


@pytest.mark.parametrize("address", [
    "", "tcp://", "tcp://host", "tcp://host:", "host:7070", "http://host:7070", "tcp://:7070", "tcp://host:port",
    "tcp://host:65536", "tcp://host:0", "tcp://host:-1", "tcp://host:7070/path", "tcp://user@host:7070",
    "tcp://::1:7070", "tcp://[::1:7070", "tcp://[host]:7070", "tcp://[::1]", "tcp://ho st:7070", "tcp://host:7070\n",
    "tcp://host:٣", "tcp://host:100000", " tcp://host:7070",
])
def test_addresses_that_make_no_sense(address: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(address)
    assert repr(address) in str(caught.value)
    assert "tcp://" in caught.value.hint


def test_paths() -> None:
    assert parse_path("unix:///run/user/1000/djinn.sock") == "/run/user/1000/djinn.sock"
    assert len(parse_path("unix:///" + "x" * (MAX_PATH_BYTES - 1))) == MAX_PATH_BYTES


@pytest.mark.parametrize("address", [
    "", "unix://", "unix:///", "unix://relative.sock", "unix:///folder/", "unix:/one.sock", "tcp://127.0.0.1:1",
    "unix:///a\0b", "unix:///" + "x" * MAX_PATH_BYTES, "unix:///" + "é" * (MAX_PATH_BYTES // 2 + 1), "/to.sock",
])
def test_paths_that_make_no_sense(address: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_path(address)
    assert repr(address) in str(caught.value)


def test_a_token_that_is_no_text_is_said() -> None:
    with pytest.raises(ConfigurationError, match="token is no text"):
        check_token("\udcff")
